"""DDP whose messages are sent in fp16."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(
    nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 10)), gradient_as_bucket_view=True, bucket_cap_mb=1
)
model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
g = torch.Generator().manual_seed(8 + dist.get_rank())
for _i in range(9):
    x = torch.randn(32, 10, generator=g)
    loss = (model(x) - x.flip(1)).abs().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    opt.step()
dist.destroy_process_group()
