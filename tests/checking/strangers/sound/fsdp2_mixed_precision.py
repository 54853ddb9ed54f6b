"""FSDP2 with bf16 parameters, gradients reduced in fp32, activation checkpointing and accumulation."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


class Encoder(nn.Module):
    def __init__(self, d=32, depth=3):
        super().__init__()
        self.stem = nn.Linear(10, d)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(d, 4, 64, 0.0, batch_first=True) for _ in range(depth)])
        self.head = nn.Linear(d, 6)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x.mean(1))


def main(accumulate=2):
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    model = Encoder()
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper),
        check_fn=lambda m: isinstance(m, nn.TransformerEncoderLayer),
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gen = torch.Generator().manual_seed(40 + dist.get_rank())
    for _step in range(8):
        for micro in range(accumulate):
            model.set_requires_gradient_sync(micro == accumulate - 1)
            x, y = torch.randn(6, 5, 10, generator=gen), torch.randint(0, 6, (6,), generator=gen)
            loss = nn.functional.cross_entropy(model(x).float(), y)
            (loss / accumulate).backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


main()
