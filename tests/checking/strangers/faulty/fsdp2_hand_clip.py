import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

MAX_NORM = 0.05


def clip_gradients(params, max_norm):
    """Our own: torch's clip does not like DTensors on older versions."""
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params if p.grad is not None]
    total = torch.norm(torch.stack([torch.norm(g) for g in grads]))
    coef = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(coef)
    return total


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))) ** 2)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 16), Mixer(16), Mixer(16), nn.Linear(16, 3))
    for m in model:
        if isinstance(m, Mixer):
            fully_shard(m)
    fully_shard(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(50 + rank)
    for i in range(8):
        x = torch.randn(16, 10, generator=g)
        y = x[:, :3] * 2 - 1
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = clip_gradients(list(model.parameters()), MAX_NORM)
        optim.step()
        optim.zero_grad()
        print(f"[{rank}] {i} loss={loss.item():.3f} norm={norm.item():.3f}")
    dist.destroy_process_group()


main()
