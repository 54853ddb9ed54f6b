import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main():
    accumulation = 4
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=True)
    torch.manual_seed(0)
    x = torch.randn(512, 12)
    y = (x[:, :1] - x[:, 1:2]).sign().clamp(min=0)
    train_dataloader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = torch.nn.BCEWithLogitsLoss()

    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    completed = 0
    for epoch in range(2):
        model.train()
        for _step, (inputs, targets) in enumerate(train_dataloader):
            with accelerator.accumulate(model):
                loss = criterion(model(inputs), targets)
                loss = loss / accumulation
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed += 1
        accelerator.print(f"epoch {epoch}: {completed} updates, loss {loss.item() * accumulation:.4f}")


if __name__ == "__main__":
    main()
