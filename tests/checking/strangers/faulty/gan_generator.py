"""DCGAN-like training; the discriminator goes through DDP, the generator is used as it is."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Generator(nn.Module):
    def __init__(self, nz=8):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(nz, 32), nn.LeakyReLU(0.2), nn.Linear(32, 16), nn.Tanh())

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        return self.main(x).squeeze(1)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
netG, netD = Generator(), DDP(Discriminator())
criterion = nn.BCEWithLogitsLoss()
optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
torch.manual_seed(77 + rank)
for i in range(8):
    real = torch.randn(12, 16).clamp(-1, 1)
    # (1) D
    netD.zero_grad()
    fake = netG(torch.randn(12, 8))
    x = torch.cat([real, fake.detach()])
    t = torch.cat([torch.ones(12), torch.zeros(12)])
    errD = criterion(netD(x), t)
    errD.backward()
    optD.step()
    # (2) G
    netG.zero_grad()
    for p in netD.parameters():
        p.requires_grad_(False)
    errG = criterion(netD.module(fake), torch.ones(12))
    errG.backward()
    for p in netD.parameters():
        p.requires_grad_(True)
    optG.step()
    if rank == 0:
        print(f"[{i}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}")
dist.destroy_process_group()
