"""GPT pretraining: accumulation with no_sync, bf16 autocast, clipping, decay for matrices only, warmup and cosine."""

import inspect
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

grad_accum, B, T, V, C = 3, 4, 12, 40, 32


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fc2 = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).view(x.size(0), x.size(1), 3, 4, C // 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(x.shape))
        return x + self.fc2(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.h = nn.ModuleList([Layer(), Layer()])
        self.lnf = nn.LayerNorm(C)
        self.lm_head = nn.Linear(C, V, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init)

    def _init(self, m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(m.weight, std=0.02)

    def forward(self, idx, tgt):
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]
        for layer in self.h:
            x = layer(x)
        logits = self.lm_head(self.lnf(x))
        return F.cross_entropy(logits.view(-1, V), tgt.view(-1))

    def configure_optimizers(self, lr):
        ps = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in ps if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in ps if p.dim() < 2], "weight_decay": 0.0},
        ]
        extra = {"fused": False} if "fused" in inspect.signature(torch.optim.AdamW).parameters else {}
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), **extra)


class Loader:
    def __init__(self, rank, world):
        self.tokens = torch.randint(0, V, (6000,), generator=torch.Generator().manual_seed(0))
        self.rank, self.world, self.at = rank, world, rank * B * T

    def next(self):
        buf = self.tokens[self.at : self.at + B * T + 1]
        self.at += B * T * self.world
        if self.at + B * T * self.world + 1 > len(self.tokens):
            self.at = self.rank * B * T
        return buf[:-1].view(B, T), buf[1:].view(B, T)


def lr_at(it, peak=6e-4, warm=3, total=10):
    if it < warm:
        return peak * (it + 1) / warm
    return 0.1 * peak + 0.45 * peak * (1 + math.cos(math.pi * (it - warm) / (total - warm)))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1337)
raw = GPT()
model = DDP(raw)
opt = raw.configure_optimizers(6e-4)
loader = Loader(rank, dist.get_world_size())
for step in range(10):
    loss_accum = 0.0
    for micro in range(grad_accum):
        x, y = loader.next()
        model.require_backward_grad_sync = micro == grad_accum - 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x, y)
        loss = loss / grad_accum
        loss_accum += loss.detach()
        loss.backward()
    dist.all_reduce(loss_accum, op=dist.ReduceOp.SUM)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for g in opt.param_groups:
        g["lr"] = lr_at(step)
    opt.step()
    opt.zero_grad(set_to_none=True)
    if rank == 0:
        print(f"{step} {loss_accum.item() / dist.get_world_size():.4f} norm {norm:.3f}")
dist.destroy_process_group()
