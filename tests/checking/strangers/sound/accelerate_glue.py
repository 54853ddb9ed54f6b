"""The usual Accelerate loop: accumulate, clip when gradients are synchronized, a schedule, gather_for_metrics."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_cosine_schedule_with_warmup


def get_dataloaders(batch_size):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 80, (330, 10), generator=g)
    labels = (ids[:, 0] > ids[:, 1]).long()
    train = TensorDataset(ids[:256], labels[:256])
    valid = TensorDataset(ids[256:], labels[256:])
    return DataLoader(train, shuffle=True, batch_size=batch_size, drop_last=True), DataLoader(valid, batch_size=16)


class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(80, 8)
        self.fc = torch.nn.Sequential(
            torch.nn.Linear(80, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2)
        )

    def forward(self, ids):
        return self.fc(self.emb(ids).flatten(1))


def training_function(config):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=config["accumulation"])
    set_seed(config["seed"], device_specific=False)
    train_dl, eval_dl = get_dataloaders(config["batch_size"])
    model = Bag()
    set_seed(config["seed"], device_specific=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    steps = len(train_dl) * config["num_epochs"] // config["accumulation"]
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=steps)
    model, optimizer, train_dl, eval_dl, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dl, eval_dl, lr_scheduler
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        for ids, labels in train_dl:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(ids), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = seen = 0
        for ids, labels in eval_dl:
            with torch.no_grad():
                predictions = model(ids).argmax(-1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            right += (predictions == references).sum().item()
            seen += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {right / seen:.3f} of {seen}")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    args = parser.parse_args()
    training_function(
        {"lr": 2e-3, "num_epochs": 2, "seed": 42, "batch_size": 8, "accumulation": args.gradient_accumulation_steps}
    )


if __name__ == "__main__":
    main()
