"""A batch with other tensors, whatever it is made of: on the worker's device, or in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on this device; arrays become tensors. A batch of a kind of its own keeps it, where it
    has a `to` of its own."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if type(batch).__module__ == "numpy" and type(batch).__name__ == "ndarray" and batch.dtype.kind in "biuf":
        return torch.from_numpy(batch).to(device)
    if isinstance(batch, Mapping):
        moved = {key: on_device(value, device) for key, value in batch.items()}
        kind: Any = type(batch)
        return moved if kind is dict else kind(moved)
    if isinstance(batch, tuple | list):
        parts = [on_device(value, device) for value in batch]
        kind = type(batch)
        return kind(*parts) if getattr(batch, "_fields", None) else kind(parts)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{field.name: on_device(getattr(batch, field.name), device) for field in fields(batch)})
    move = getattr(batch, "to", None)
    return move(device) if callable(move) else batch


def widened(tensor: Tensor) -> Tensor:
    """Floating-point numbers as float64, others as they are."""
    return tensor.double() if tensor.is_floating_point() else tensor


def cloned(batch: Any) -> Any:
    """The batch with tensors of its own: a loss may write into them, as into a state that goes from batch to batch."""
    return mapped(batch, Tensor.clone)


def mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch of the same kind whose tensors, and numpy arrays as tensors, are changed."""
    if isinstance(batch, Tensor):
        return change(batch)
    if type(batch).__module__ == "numpy" and hasattr(batch, "shape"):
        return change(torch.as_tensor(batch))
    if isinstance(batch, Mapping):
        kind: Any = type(batch)
        return kind({key: mapped(value, change) for key, value in batch.items()})
    if isinstance(batch, tuple | list):
        parts = [mapped(value, change) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{field.name: mapped(getattr(batch, field.name), change) for field in fields(batch)})
    return batch
