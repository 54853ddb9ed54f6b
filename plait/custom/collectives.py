"""Values from worker to worker for a person's own loop: `plait.broadcast` and `plait.all_reduce`."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from plait.custom.group import find_workers
from plait.errors import PlaitError

Reduction = Literal["sum", "mean", "largest", "smallest"]


def broadcast(value: Any, source: int = 0) -> Any:
    """What worker `source` has, on all: a tensor (in place, and returned) or a number. Every worker must call it;
    blocks."""
    if not _grouped():
        return value
    tensor = _as_tensor(value)
    if not 0 <= source < dist.get_world_size():
        raise PlaitError(f"source = {source} is no worker; there are {dist.get_world_size()}, counted from 0")
    dist.broadcast(tensor, src=source)
    return _as_given(tensor, value)


def all_reduce(value: Any, how: Reduction = "sum") -> Any:
    """The sum, mean, largest or smallest of all workers' values: a tensor (in place, and returned) or a number. Every
    worker must call it; blocks."""
    operations = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "largest": dist.ReduceOp.MAX,
                  "smallest": dist.ReduceOp.MIN}  # fmt: skip
    if how not in operations:
        raise PlaitError(f'how = "{how}" is unknown; choose {", ".join(operations)}')
    if not _grouped():
        return value
    tensor = _as_tensor(value)
    dist.all_reduce(tensor, op=operations[how])
    if how == "mean":
        if not tensor.is_floating_point() and isinstance(value, Tensor):
            raise PlaitError("the mean of whole numbers is no whole number; give a tensor of floats")
        tensor /= dist.get_world_size()
    return _as_given(tensor, value)


def _grouped() -> bool:
    return dist.get_world_size() > 1 if dist.is_initialized() else find_workers().size > 1


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlaitError(f"a {type(value).__name__} does not travel; give a tensor or a number")
    return torch.tensor(value, dtype=torch.float64)


def _as_given(tensor: Tensor, value: Any) -> Any:
    if isinstance(value, Tensor):
        return tensor
    number = tensor.item()
    return int(number) if isinstance(value, int) and number == int(number) else number
