"""Two-part detector; gradients averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn


def sync_grads(module):
    for p in module.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU())
        self.cls_head = nn.Linear(8, 5)
        self.box_head = nn.Linear(8, 4)

    def forward(self, images):
        f = self.backbone(images).mean((2, 3))
        return self.cls_head(f), self.box_head(f)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = Detector()
for t in net.state_dict().values():
    dist.broadcast(t, 0)

opt = torch.optim.SGD(
    [
        {"params": net.backbone.parameters(), "lr": 1e-3},
        {"params": [*net.cls_head.parameters(), *net.box_head.parameters()]},
    ],
    lr=1e-2,
    momentum=0.9,
)

torch.manual_seed(100 + rank)
for it in range(8):
    images = torch.randn(6, 3, 16, 16)
    classes, boxes = torch.randint(0, 5, (6,)), torch.rand(6, 4)
    scores, pred = net(images)
    loss = nn.functional.cross_entropy(scores, classes) + nn.functional.smooth_l1_loss(pred, boxes)
    opt.zero_grad()
    loss.backward()
    sync_grads(net.backbone)
    opt.step()
    if rank == 0:
        print(it, float(loss))
dist.destroy_process_group()
