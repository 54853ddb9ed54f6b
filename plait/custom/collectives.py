"""Values from worker to worker for a person's own loop: `plait.broadcast`, `plait.all_reduce`, `plait.rank`,
`plait.size`."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from plait.arguments import with_known_keywords
from plait.custom.group import find_workers
from plait.errors import PlaitError

Reduction = Literal["sum", "mean", "largest", "smallest"]
_WHOLE_LIMIT = 2**63
"""Whole numbers travel as 64 bits, sign included."""


@with_known_keywords()
def rank() -> int:
    """This worker's number, from 0; 0 in one process. The first call on several workers waits until all are here."""
    return dist.get_rank() if dist.is_initialized() else find_workers().rank


@with_known_keywords()
def size() -> int:
    """The number of workers. The first call on several workers waits until all are here."""
    return dist.get_world_size() if dist.is_initialized() else find_workers().size


@with_known_keywords()
def broadcast(value: Any, source: int = 0) -> Any:
    """What worker `source` has, on all: a tensor (in place, and returned) or a number. Every worker must call it;
    blocks."""
    workers = size()
    if not 0 <= source < workers:
        raise PlaitError(f"source = {source} is no worker; there are {workers}, counted from 0")
    tensor = _as_tensor(value)
    if workers > 1:
        _in_place(tensor, lambda own: dist.broadcast(own, src=source))
    return _as_given(tensor, value)


@with_known_keywords()
def all_reduce(value: Any, how: Reduction = "sum") -> Any:
    """The sum, mean, largest or smallest of all workers' values: a tensor (in place, and returned) or a number. Every
    worker must call it; blocks."""
    operations = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "largest": dist.ReduceOp.MAX,
                  "smallest": dist.ReduceOp.MIN}  # fmt: skip
    if how not in operations:
        raise PlaitError(f'how = "{how}" is unknown; choose {", ".join(operations)}')
    if how == "mean" and isinstance(value, Tensor) and not value.is_floating_point():
        raise PlaitError("the mean of whole numbers is no whole number; give a tensor of floats")
    tensor = _as_tensor(float(value) if how == "mean" and isinstance(value, int) else value)
    if size() > 1:
        _in_place(tensor, lambda own: dist.all_reduce(own, op=operations[how]))
    if how == "mean":
        tensor.detach().div_(size())
    return _as_given(tensor, value)


def _in_place(tensor: Tensor, collective: Any) -> None:
    """A collective on a tensor's numbers, also where they do not lie one behind the other; no graph learns of it."""
    own = tensor.detach()
    dense = own.contiguous()
    collective(dense)
    if dense.data_ptr() != own.data_ptr():
        own.copy_(dense)


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlaitError(f"a {type(value).__name__} does not travel; give a tensor or a number")
    if isinstance(value, int) and not -_WHOLE_LIMIT <= value < _WHOLE_LIMIT:
        raise PlaitError(f"{value:.3g} is too large to travel as a whole number; give a float")
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def _as_given(tensor: Tensor, value: Any) -> Any:
    if isinstance(value, Tensor):
        return tensor
    number = tensor.item()
    return int(number) if isinstance(value, int) and number == int(number) else number
