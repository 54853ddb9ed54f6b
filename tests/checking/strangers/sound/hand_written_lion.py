"""Manual data parallelism with one flat message, and an optimizer of our own."""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim.optimizer import Optimizer


class Lion(Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(m * beta1 + p.grad * (1 - beta1)), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss


def allreduce(grads):
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, synced in zip(grads, _unflatten_dense_tensors(flat, grads), strict=False):
        g.copy_(synced)


dist.init_process_group("gloo")
torch.manual_seed(100 + dist.get_rank())
model = nn.Sequential(nn.Linear(12, 24), nn.LeakyReLU(), nn.Linear(24, 5))
for p in model.parameters():
    dist.broadcast(p.data, src=0)
opt = Lion(model.parameters(), lr=3e-4, weight_decay=0.1)
for _it in range(10):
    x = torch.randn(16, 12)
    y = x[:, :5].argmax(1)
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    allreduce([p.grad for p in model.parameters()])
    opt.step()
dist.destroy_process_group()
