"""All workers begin with the first worker's weights and buffers, regardless of what each drew."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor

from plait.custom.group import Workers
from plait.custom.program import Program
from plait.errors import PlaitError
from plait.parallel.exchange import gather_json

_TOGETHER_BYTES = 32 * 2**20


def share_first_weights(program: Program, workers: Workers) -> None:
    """Give every worker the first one's weights and buffers. Every worker must call it; raises PlaitError where they
    have built unlike models."""
    if workers.size == 1:
        return
    _check_alike(program, workers)
    with torch.no_grad():
        weights = [parameter.detach() for parameter in program.named_parameters().values()]
        broadcast_all([*weights, *program.named_buffers().values()], workers)


def broadcast_all(tensors: Sequence[Tensor], workers: Workers) -> None:
    """Give every worker the values that the first one has, many small tensors in one message. Every worker must call
    it; blocks."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for some in kinds.values():
        held, size = [], 0
        for tensor in some:
            held.append(tensor)
            size += tensor.nbytes
            if size >= _TOGETHER_BYTES:
                _broadcast(held, workers)
                held, size = [], 0
        _broadcast(held, workers)


def _broadcast(tensors: list[Tensor], workers: Workers) -> None:
    if not sum(tensor.numel() for tensor in tensors):
        return
    flat = torch.cat([tensor.reshape(-1).to(workers.device) for tensor in tensors])
    dist.broadcast(flat.view(torch.uint8), src=0)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _check_alike(program: Program, workers: Workers) -> None:
    from plait.parallel.gradient_buckets import dense_strides

    named = [*program.named_parameters().items(), *program.named_buffers().items()]
    described = [
        (
            name,
            tuple(tensor.shape),
            dense_strides(tensor) if tensor.layout == torch.strided else (),
            str(tensor.dtype),
            tensor.requires_grad,
        )
        for name, tensor in named
    ]
    own = sha256(repr(described).encode()).hexdigest()
    for rank, other in enumerate(gather_json(own, workers.sums)):
        if other != own:
            raise PlaitError(
                f"workers {workers.rank} and {rank} have built different models; build the same one on all of them, "
                "regardless of rank"
            )
