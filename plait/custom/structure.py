"""What is made of tensors and arrays in mappings, tuples, lists and dataclasses: its parts, and others in their places.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def is_array(value: Any) -> bool:
    """Whether this is a tensor, or an array of numpy's."""
    return isinstance(value, Tensor) or (type(value).__module__ == "numpy" and type(value).__name__ == "ndarray")


def leaves(value: Any, is_leaf: Callable[[Any], bool] = is_array) -> Iterator[Any]:
    """All parts in order, from the outside in up to the leaves: what `is_leaf`, and what holds nothing."""
    if is_leaf(value):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from leaves(one, is_leaf)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from leaves(one, is_leaf)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from leaves(getattr(value, field.name), is_leaf)
    else:
        yield value


def with_leaves(value: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = is_array) -> Any:
    """The same structure around what `change` makes of its leaves."""
    kind: Any = type(value)
    if is_leaf(value):
        return change(value)
    if isinstance(value, Mapping):
        return kind({key: with_leaves(one, change, is_leaf) for key, one in value.items()})
    if isinstance(value, tuple | list):
        parts = [with_leaves(one, change, is_leaf) for one in value]
        return kind(*parts) if hasattr(value, "_fields") else kind(parts)
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{name: with_leaves(one, change, is_leaf) for name, one in named.items()})
    return change(value)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in it, in order; numpy's arrays and numbers as tensors among them."""
    for leaf in leaves(value):
        if (tensor := _as_tensor(leaf)) is not None:
            yield tensor


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with other tensors, numpy's arrays as tensors among them."""

    def changed(leaf: Any) -> Any:
        tensor = _as_tensor(leaf)
        return leaf if tensor is None else change(tensor)

    return with_leaves(value, changed)


def _as_tensor(leaf: Any) -> Tensor | None:
    if isinstance(leaf, Tensor):
        return leaf
    return torch.as_tensor(leaf) if type(leaf).__module__ == "numpy" and hasattr(leaf, "shape") else None


def cloned(batch: Any) -> Any:
    """The batch with separate tensors: a loss may write into them, as into a state that goes from batch to batch."""
    return mapped(batch, Tensor.clone)


def widened(tensor: Tensor) -> Tensor:
    """Floating-point numbers as float64, others as they are."""
    return tensor.double() if tensor.is_floating_point() else tensor


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on this device; arrays become tensors. A batch of a kind of its own keeps it, where it
    has a `to` of its own."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        if is_array(leaf):
            return torch.from_numpy(leaf).to(device) if leaf.dtype.kind in "biuf" else leaf
        move = getattr(leaf, "to", None)
        return move(device) if callable(move) else leaf

    return with_leaves(batch, moved)
