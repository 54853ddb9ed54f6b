"""A loop at torchtitan's level on one GPU: FSDP2 with bf16 weights and float32 sums, each block compiled, fused AdamW.

The model, the steps and the flags are gpu_loop's; what differs is how the model is arranged, as torchtitan does it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.peers.gpu_loop import main


def sharded_blocks(model: nn.Module, flags: argparse.Namespace) -> tuple[nn.Module, AbstractContextManager[object]]:
    """Each block compiled, then split over the one rank by FSDP2, which also rounds the weights."""
    mesh = init_device_mesh(flags.device, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = model.get_submodule("blocks")
    for block in blocks.children():
        if flags.compile == "model":
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, nullcontext()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{folder}/rendezvous"
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, init_method=place, rank=0, world_size=1)
        main(sharded_blocks)
    os._exit(0)  # see contender.leave
