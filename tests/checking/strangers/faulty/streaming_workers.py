"""Streams lines of text; each worker of each rank should read its own part of the lines."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class LineStream(IterableDataset):
    def __init__(self, total, context=8):
        super().__init__()
        self.total = total
        self.context = context

    def line(self, number):
        return torch.randint(0, 30, (self.context,), generator=torch.Generator().manual_seed(number))

    def __iter__(self):
        info = get_worker_info()
        worker_id, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, world = dist.get_rank() if dist.is_initialized() else 0, 1
        shard = rank * workers + worker_id
        for number in range(shard, self.total, world * workers):
            yield self.line(number)


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 16)
        self.out = nn.Linear(16, 30)

    def forward(self, x):
        return self.out(self.emb(x))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Bigram())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(LineStream(256), batch_size=8, num_workers=0, drop_last=True)
    for step, tokens in enumerate(loader):
        if step == 12:
            break
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 30), tokens[:, 1:].reshape(-1))
        loss.backward()
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0 and step % 4 == 0:
            print("step", step, "loss", loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
