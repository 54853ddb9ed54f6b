"""Random draws that are the same for every example, so that parts of a batch can be compared with the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_ATTENTION = ("_scaled_dot_product", "_efficient_attention", "_flash_attention", "scaled_dot_product")


class SameDraws(TorchDispatchMode):
    """Whatever draws random numbers along the examples (dim 0) of a tensor gives each of them those of a single one,
    which follow from the shape and the operation alone. Dropout, noise and random time steps stay what they are, and
    neither the size of a batch nor the place of an example in it changes them."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown = False
        """Whether something was drawn in a way that this class does not know."""
        self.narrow = False
        """Whether something was computed in less than float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        found = self._drawn(func, args, named) if _draws(func) else func(*args, **named)
        self.narrow |= any(one.is_floating_point() and one.dtype != torch.float64 for one in _tensors(found))
        return found

    def _drawn(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        name: str = func.overloadpacket.__name__
        first: Any = args[0] if args else None
        torch.manual_seed(7)
        if name.startswith(_ATTENTION):
            self.unknown |= any(isinstance(one, float) and one > 0 for one in args[3:5])  # the share that is dropped
            return func(*args, **named)
        if name == "native_dropout":
            kept = _row(first, lambda row: row.uniform_()) >= args[1]
            return first * kept / (1 - args[1]), kept
        if name in ("bernoulli", "bernoulli_") and len(args) > 1 and isinstance(args[1], Tensor):
            return first.copy_(_row(first, lambda row: row.uniform_()) < args[1])
        if func is _ATEN.bernoulli.default:
            return (_row(first, lambda row: row.uniform_()) < first).to(first.dtype)
        if name == "normal" and isinstance(first, Tensor):
            return first + args[1] * _row(first, lambda row: row.normal_())
        if name == "randperm":
            return torch.arange(args[0], **_known(named))
        if name.endswith("_like"):
            return _row(first, lambda row: func(row, *args[1:], **named))
        if name.endswith("_") and isinstance(first, Tensor):
            return first.copy_(_row(first, lambda row: func(row, *args[1:], **named)))
        place = next((number for number, one in enumerate(args) if isinstance(one, list | tuple)), None)
        if place is not None and name in ("rand", "randn", "randint", "normal"):
            size = list(args[place])
            one = func(*args[:place], [1, *size[1:]] if size else size, *args[place + 1 :], **named)
            return one.expand(size).clone()
        self.unknown = True
        return func(*args, **named)


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _row(like: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
    """The draw for one example, given to all of a tensor."""
    return draw(like.new_empty((1, *like.shape[1:]) if like.dim() else ())).expand_as(like)


def _known(named: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in named.items() if key in ("dtype", "device")}


def _tensors(found: Any) -> list[Tensor]:
    several = found if isinstance(found, tuple | list) else (found,)
    return [one for one in several if isinstance(one, Tensor)]
