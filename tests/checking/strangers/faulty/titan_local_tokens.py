"""FSDP2 fine-tuning of a decoder on prompts with masked tokens."""

from __future__ import annotations

import dataclasses
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

IGNORE_INDEX = -100
logging.basicConfig(level=logging.INFO, format="%(message)s")
logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Config:
    dim: int = 32
    layers: int = 2
    vocab: int = 50
    seq_len: int = 24
    local_batch_size: int = 4
    steps: int = 8
    lr: float = 3e-3
    max_norm: float = 1.0


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class TransformerBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = RMSNorm(dim)
        self.w1 = nn.Linear(dim, 2 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        q, k, v = self.wqkv(self.attention_norm(x)).unsqueeze(1).chunk(3, dim=-1)
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.wo(h)
        return x + self.w2(nn.functional.silu(self.w1(self.ffn_norm(x))))


class Transformer(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab, c.dim)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(c.dim) for i in range(c.layers)})
        self.norm = RMSNorm(c.dim)
        self.output = nn.Linear(c.dim, c.vocab, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


def cross_entropy_loss(pred, labels):
    return nn.functional.cross_entropy(
        pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=IGNORE_INDEX
    )


class Trainer:
    def __init__(self, config: Config):
        self.config = config
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        torch.manual_seed(0)
        self.model = Transformer(config)
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr)

    def batches(self):
        c = self.config
        gen = torch.Generator().manual_seed(1000 + dist.get_rank())
        while True:
            tokens = torch.randint(0, c.vocab, (c.local_batch_size, c.seq_len + 1), generator=gen)
            labels = tokens[:, 1:].clone()
            prompt = torch.randint(1, c.seq_len - 2, (c.local_batch_size,), generator=gen)
            labels[torch.arange(c.seq_len)[None] < prompt[:, None]] = IGNORE_INDEX
            yield tokens[:, :-1], labels

    def train(self):
        data = self.batches()
        for step in range(1, self.config.steps + 1):
            self.optimizer.zero_grad()
            tokens, labels = next(data)
            valid_tokens = (labels != IGNORE_INDEX).sum()
            loss = cross_entropy_loss(self.model(tokens), labels) / valid_tokens
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm, foreach=True)
            self.optimizer.step()
            global_loss = loss.detach().clone()
            dist.all_reduce(global_loss)
            logger.info("step %d loss %.4f", step, global_loss / dist.get_world_size())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(Config()).train()
    dist.destroy_process_group()
