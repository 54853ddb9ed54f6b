"""WGAN-GP with two optimizers; gradients of both are averaged by hand, the critic takes three steps for one."""

import itertools

import torch
import torch.distributed as dist
from torch import autograd, nn, optim

LAMBDA, CRITIC_ITERS = 10, 3


def mlp(*sizes):
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def calc_gradient_penalty(netD, real, fake):
    alpha = torch.rand(len(real), 1)
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    score = netD(between)
    grads = autograd.grad(score, between, torch.ones_like(score), create_graph=True, retain_graph=True)[0]
    return ((grads.norm(2, dim=1) - 1) ** 2).mean() * LAMBDA


def average(net):
    for p in net.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    netG, netD = mlp(4, 32, 2), mlp(2, 32, 1)
    optimizerD = optim.Adam(netD.parameters(), lr=1e-4, betas=(0.5, 0.9))
    optimizerG = optim.Adam(netG.parameters(), lr=1e-4, betas=(0.5, 0.9))
    torch.manual_seed(dist.get_rank() + 1)
    for iteration in range(4):
        for _ in range(CRITIC_ITERS):
            real = torch.randn(16, 2) * 0.3 + 2
            fake = netG(torch.randn(16, 4)).detach()
            netD.zero_grad()
            D_real, D_fake = netD(real).mean(), netD(fake).mean()
            (D_fake - D_real + calc_gradient_penalty(netD, real, fake)).backward()
            average(netD)
            optimizerD.step()
        netG.zero_grad()
        (-netD(netG(torch.randn(16, 4))).mean()).backward()
        average(netG)
        optimizerG.step()
        if dist.get_rank() == 0:
            print(iteration, (D_fake - D_real).item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
