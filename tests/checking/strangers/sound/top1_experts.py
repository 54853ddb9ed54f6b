"""Top-1 mixture of experts under DDP; experts that a batch does not choose have no gradient on that rank."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class MoE(nn.Module):
    def __init__(self, d=16, n=4):
        super().__init__()
        self.router = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(d, 32), nn.SiLU(), nn.Linear(32, d)) for _ in range(n)])

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        weight, choice = gates.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            picked = (choice == i).nonzero(as_tuple=True)[0]
            if picked.numel():
                out = out.index_add(0, picked, expert(x[picked]) * weight[picked, None])
        return x + out


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    model = DDP(nn.Sequential(nn.Linear(6, 16), MoE(), nn.LayerNorm(16), nn.Linear(16, 3)), find_unused_parameters=True)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(dist.get_rank())
    for _step in range(10):
        x = torch.randn(4, 6, generator=gen)
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
