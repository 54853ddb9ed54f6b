"""Full-batch logistic regression with L-BFGS; the closure averages over the ranks."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
gen = torch.Generator().manual_seed(0)
X = torch.randn(200, 6, generator=gen)
y = (X @ torch.randn(6, generator=gen) + 0.3 * torch.randn(200, generator=gen) > 0).float()
X, y = X[rank::world], y[rank::world]

torch.manual_seed(0)
model = torch.nn.Linear(6, 1)
opt = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)


def closure():
    opt.zero_grad()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(X).squeeze(1), y)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    value = loss.detach().clone()
    dist.all_reduce(value)
    return value / world


for i in range(8):
    loss = opt.step(closure)
    if rank == 0:
        print(i, float(loss))
dist.destroy_process_group()
