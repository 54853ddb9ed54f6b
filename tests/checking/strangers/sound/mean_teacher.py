"""Mean teacher: an exponential average of the student's weights gives targets for a consistency loss."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def update_ema(teacher, student, decay):
    for t, s in zip(teacher.parameters(), student.parameters(), strict=False):
        t.mul_(decay).add_(s.detach(), alpha=1 - decay)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
    teacher = copy.deepcopy(student).requires_grad_(False)
    ddp = DDP(student)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    torch.manual_seed(500 + rank)
    for step in range(9):
        x, y = torch.randn(20, 8), torch.randint(0, 5, (20,))
        with torch.no_grad():
            target = teacher(x + 0.05 * torch.randn_like(x)).softmax(-1)
        logits = ddp(x + 0.05 * torch.randn_like(x))
        supervised = F.cross_entropy(logits, y)
        consistency = F.mse_loss(logits.softmax(-1), target)
        loss = supervised + min(1.0, step / 5) * 7.5 * consistency
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_ema(teacher, student, min(0.99, 1 - 1 / (step + 1)))
    dist.destroy_process_group()


main()
