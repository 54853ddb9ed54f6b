"""Plain values and named tensors from worker to worker, as JSON and bytes: nothing that arrives is run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.custom.group import Workers
from plait.errors import PlaitError

TRAVELLING_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)}  # fmt: skip
"""The element types that travel, by their names."""


def gather_json(value: Any, workers: Workers) -> list[Any]:
    """Every worker's value, in rank order. Every worker must call it; blocks. Values are JSON."""
    if workers.size == 1:
        return [value]
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [int(size) for size in workers.sums.gather(torch.tensor([len(own)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(own)] = own
    found = workers.sums.gather(padded)
    return [json.loads(bytes(one[:size].numpy())) for one, size in zip(found, sizes, strict=True)]


def first_ones(make: Callable[[], Any], workers: Workers) -> Any:
    """What the first worker makes, JSON, on all; a PlaitError that it raises is raised by all. Blocks."""
    told: dict[str, Any] = {}
    if workers.rank == 0:
        try:
            told = {"value": make()}
        except PlaitError as error:
            told = {"error": str(error)}
    told = gather_json(told, workers)[0]
    if "error" in told:
        raise PlaitError(told["error"])
    return told["value"]


def first_tensors(tensors: Mapping[str, Tensor], workers: Workers) -> dict[str, Tensor]:
    """The first worker's named tensors on all, on the processor; the others' argument is not looked at. Blocks."""
    if workers.size == 1:
        return dict(tensors)
    described = first_ones(lambda: [[name, _name_of(t.dtype), list(t.shape)] for name, t in tensors.items()], workers)
    found = {}
    for name, dtype, shape in described:
        there = tensors[name] if workers.rank == 0 else torch.empty(shape, dtype=TRAVELLING_DTYPES[dtype])
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


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
