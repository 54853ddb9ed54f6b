"""A batch brought to the worker's device, whatever it is made of."""

from __future__ import annotations

from collections.abc import Mapping
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
