"""torch.compile around DDP; Nadam; two losses backward one after the other."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Multi(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.a = nn.Linear(16, 3)
        self.b = nn.Linear(16, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.a(h), self.b(h).squeeze(-1)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.compile(DDP(Multi()), backend="eager")
opt = torch.optim.NAdam(model.parameters(), lr=1e-3)
g = torch.Generator().manual_seed(3 + dist.get_rank())
for _ in range(8):
    x = torch.randn(12, 8, generator=g)
    logits, value = model(x)
    loss = nn.functional.cross_entropy(logits, x[:, :3].argmax(1)) + 0.25 * nn.functional.l1_loss(value, x.mean(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
