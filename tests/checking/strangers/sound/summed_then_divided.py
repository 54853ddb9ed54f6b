"""No wrapper: each rank backpropagates sums, gradients are summed, then divided by the examples of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
W1 = torch.nn.Parameter(torch.randn(5, 20) * 0.3)
b1 = torch.nn.Parameter(torch.zeros(20))
W2 = torch.nn.Parameter(torch.randn(20, 3) * 0.3)
params = [W1, b1, W2]
opt = torch.optim.SGD(params, lr=0.1)
gen = torch.Generator().manual_seed(rank + 1)
for step in range(8):
    n = 5 + 6 * rank + step % 3
    x, y = torch.randn(n, 5, generator=gen), torch.randint(0, 3, (n,), generator=gen)
    loss = F.cross_entropy(torch.relu(x @ W1 + b1) @ W2, y, reduction="sum")
    grads = torch.autograd.grad(loss, params)
    count = torch.tensor(float(n))
    handles = [dist.all_reduce(t, async_op=True) for t in (*grads, count)]
    for h in handles:
        h.wait()
    for p, g in zip(params, grads, strict=False):
        p.grad = g / count
    opt.step()
dist.destroy_process_group()
