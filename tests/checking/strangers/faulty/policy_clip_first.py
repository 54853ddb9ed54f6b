"""REINFORCE-like update with several actors: every rank computes gradients, then they are averaged."""

import torch
import torch.distributed as dist
import torch.nn as nn


class ActorCritic(nn.Module):
    def __init__(self, obs=6, act=3):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(obs, 32), nn.Tanh())
        self.policy = nn.Linear(32, act)
        self.value = nn.Linear(32, 1)

    def forward(self, o):
        h = self.shared(o)
        return self.policy(h), self.value(h).squeeze(-1)


def allreduce_grads(model):
    flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


def rollout(rank, update):
    g = torch.Generator().manual_seed(1000 * rank + update)
    return (
        torch.randn(32, 6, generator=g),
        torch.randint(0, 3, (32,), generator=g),
        torch.randn(32, generator=g) * (1 + 3 * rank),
    )


dist.init_process_group("gloo")
torch.manual_seed(9)
model = ActorCritic()
optimizer = torch.optim.Adam(model.parameters(), lr=7e-4, eps=1e-5)
for update in range(10):
    obs, actions, returns = rollout(dist.get_rank(), update)
    logits, values = model(obs)
    log_probs = nn.functional.log_softmax(logits, -1).gather(1, actions[:, None]).squeeze(1)
    advantage = returns - values.detach()
    loss = -(advantage * log_probs).mean() + 0.5 * (returns - values).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
    allreduce_grads(model)
    optimizer.step()
dist.destroy_process_group()
