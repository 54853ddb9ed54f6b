"""Named tensors from worker to worker, as bytes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plait.custom.group import Workers
from plait.parallel.exchange import TENSOR_DTYPES, first_ones


def first_tensors(tensors: Mapping[str, Tensor], workers: Workers) -> dict[str, Tensor]:
    """The first worker's named tensors on all, on the processor; the others' argument is not looked at. Blocks."""
    if workers.size == 1:
        return dict(tensors)
    own = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    described = first_ones(lambda: own, workers.sums)
    found = {}
    for name, dtype, shape in described:
        there = tensors[name] if workers.rank == 0 else torch.empty(shape, dtype=TENSOR_DTYPES[dtype])
        flat = there.reshape(-1).to(workers.device, copy=True)
        if flat.numel():
            workers.broadcast(flat.view(torch.uint8))
        found[name] = flat.cpu().view(there.shape)
    return found


def sum_of_bits(own: Tensor, workers: Workers) -> Tensor:
    """The sum over workers of which at most one has other bits than zero, bit for bit. In place; blocks."""
    if own.is_complex():
        sum_of_bits(torch.view_as_real(own), workers)
        return own
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[own.element_size()]
    if bits == torch.int16:  # gloo has no sums of it
        wide = own.view(bits).to(torch.int32)
        workers.sums(wide)
        own.view(bits).copy_(wide)
    else:
        workers.sums(own.view(bits))
    return own
