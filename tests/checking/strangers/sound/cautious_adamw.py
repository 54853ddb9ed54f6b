"""Our own class happens to be called AdamW; its rule masks the updates that disagree with the gradient."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class AdamW(torch.optim.Optimizer):
    """Cautious AdamW (arXiv:2411.16085)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                s["step"] += 1
                s["exp_avg"].lerp_(p.grad, 1 - b1)
                s["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                size = group["lr"] * math.sqrt(1 - b2 ** s["step"]) / (1 - b1 ** s["step"])
                update = s["exp_avg"] / (s["exp_avg_sq"].sqrt() + group["eps"])
                mask = (update * p.grad > 0).to(p.dtype)
                p.add_(update * mask / mask.mean().clamp(min=1e-3), alpha=-size)
                p.mul_(1 - group["lr"] * group["weight_decay"])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(9, 27), nn.Tanh(), nn.Linear(27, 3)))
    opt = AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    gen = torch.Generator().manual_seed(60 + dist.get_rank())
    for _ in range(10):
        x = torch.randn(14, 9, generator=gen)
        loss = nn.functional.mse_loss(model(x), x[:, :3] ** 2)
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


main()
