# Frame classifier for speech features; DDP without a message in the micro-batches that do not step.
import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Frames(Dataset):
    def __init__(self, n=256, dim=20, classes=7):
        g = torch.Generator().manual_seed(11)
        self.feats = torch.randn(n, dim, generator=g)
        self.labels = torch.randint(0, classes, (n,), generator=g)

    def __len__(self):
        return len(self.feats)

    def __getitem__(self, i):
        return {"speech": self.feats[i], "text": self.labels[i]}


class Encoder(nn.Module):
    def __init__(self, dim, hidden, classes):
        super().__init__()
        self.proj = nn.Linear(dim, hidden)
        self.layers = nn.Sequential(nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.out = nn.Linear(hidden, classes)

    def forward(self, speech, text):
        logits = self.out(self.layers(self.proj(speech)))
        return nn.functional.cross_entropy(logits, text), logits


def train_one_epoch(args, model, loader, optim):
    accum_grad = args.accum_grad
    model.train()
    for batch_idx, batch in enumerate(loader):
        my_context = model.no_sync if batch_idx % accum_grad != 0 else nullcontext
        with my_context():
            loss, _ = model(batch["speech"], batch["text"])
            loss = loss / accum_grad
            loss.backward()
        if (batch_idx + 1) % accum_grad == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            optim.step()
            optim.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--accum_grad", type=int, default=2)
    parser.add_argument("--grad_clip", type=float, default=50.0)
    parser.add_argument("--max_epoch", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(777)
    dataset = Frames()
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(Encoder(20, 32, 7))
    optim = torch.optim.Adam(model.parameters(), lr=5e-4)
    for epoch in range(args.max_epoch):
        sampler.set_epoch(epoch)
        train_one_epoch(args, model, loader, optim)
        if dist.get_rank() == 0:
            print("epoch", epoch, "done")
    dist.destroy_process_group()
