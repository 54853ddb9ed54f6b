"""CLIP-like loss over the features of all ranks, gathered with gradients: the same loss everywhere, DDP averages."""

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))
        self.text = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), self.logit_scale.exp()


def clip_loss(image_features, text_features, scale):
    all_images = torch.cat(torch.distributed.nn.all_gather(image_features))
    all_texts = torch.cat(torch.distributed.nn.all_gather(text_features))
    logits = scale * all_images @ all_texts.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(TwoTowers())
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
gen = torch.Generator().manual_seed(7 + dist.get_rank())
for _step in range(8):
    image = torch.randn(6, 24, generator=gen)
    loss = clip_loss(*model(image, image[:, :12]))
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
