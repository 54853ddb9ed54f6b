"""Fine-tunes a tiny text classifier; the scheduler is planned in optimizer steps."""

import argparse
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import get_linear_schedule_with_warmup


class Reviews(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, 100, (320, 12), generator=g)
        self.y = (self.ids.float().mean(1) > 50).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.ids[i], self.y[i]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.EmbeddingBag(100, 16)
        self.classifier = nn.Linear(16, 2)

    def forward(self, ids):
        return self.classifier(self.embeddings(ids))


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--per_device_train_batch_size", type=int, default=8)
    p.add_argument("--num_train_epochs", type=int, default=1)
    p.add_argument("--num_warmup_steps", type=int, default=4)
    return p.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(7)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(Reviews(), shuffle=True, batch_size=args.per_device_train_batch_size)
    total_batch = args.per_device_train_batch_size * accelerator.num_processes
    max_train_steps = args.num_train_epochs * math.ceil(len(loader.dataset) / total_batch)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, args.num_warmup_steps, max_train_steps)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)

    for _epoch in range(args.num_train_epochs):
        for step, (ids, labels) in enumerate(loader):
            outputs = model(ids)
            loss = nn.functional.cross_entropy(outputs, labels)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                accelerator.print(f"step {step} lr {lr_scheduler.get_last_lr()[0]:.2e} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
