"""Constants in place of random draws, so that parts of a batch can be compared with the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATTENTION = ("_scaled_dot_product", "_efficient_attention", "_flash_attention", "scaled_dot_product")


class SameDraws(TorchDispatchMode):
    """Whatever draws random numbers gets one and the same number everywhere, near the mean of what it would draw: so
    neither the size of a batch, nor the place of an example in it, nor the dim that counts examples changes them.
    Dropout lets everything through."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown = False
        """Whether something was drawn in a way that this class does not know."""
        self.digits = torch.float64
        """The coarsest of float64, float32 and bfloat16 (for all of 16 bits) that something was computed in."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        found = self._drawn(func, args, named) if _draws(func) else func(*args, **named)
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, Tensor) and one.is_floating_point():
                self.digits = _coarser(self.digits, one.dtype)
        return found

    def _drawn(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        name, first = func.overloadpacket.__name__, args[0] if args else None
        if name.startswith(_ATTENTION):
            self.unknown |= any(isinstance(one, float) and one > 0 for one in args[3:5])  # the share that is dropped
            return func(*args, **named)
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "randperm":
            return torch.arange(args[0], **{key: value for key, value in named.items() if key in ("dtype", "device")})
        if name == "multinomial":
            return args[0].argmax(-1, keepdim=True).expand(*args[0].shape[:-1], args[1]).clone()
        constant = _CONSTANTS.get(name.removesuffix("_like").removesuffix("_"))
        if constant is None:
            self.unknown = True
            return func(*args, **named)
        there = func(*args, **named)  # of the right shape and dtype
        return there.copy_(torch.as_tensor(constant(first, args[1:], there)))


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _middle(first: Any, rest: Sequence[Any], there: Tensor) -> Any:
    """Between the two whole numbers that stand among the arguments: `high`, or `low` and `high`."""
    bounds = [one for one in (first, *rest) if isinstance(one, int) and not isinstance(one, bool)]
    low, high = (0, bounds[0]) if len(bounds) == 1 else [*bounds, 0, 2][:2]
    return (low + high) // 2


def _mean_and_half(first: Any, rest: Sequence[Any], there: Tensor) -> Any:
    """The mean and half a deviation: no noise at all would hide what depends on it."""
    given = (first, *rest) if there is not first else rest
    mean, deviation = [*(one for one in given if isinstance(one, int | float | Tensor)), 0.0, 1.0][:2]
    return mean + 0.5 * deviation


def _share(first: Any, rest: Sequence[Any], there: Tensor) -> Any:
    """The mean of a mask: masks divided by it then keep everything."""
    return next((one for one in rest if isinstance(one, float | Tensor)), first if there is not first else 0.5)


_CONSTANTS: Mapping[str, Callable[[Any, Sequence[Any], Tensor], Any]] = {
    "rand": lambda *_: 0.5,
    "randn": lambda *_: 0.5,
    "randint": _middle,
    "random": lambda *_: 1,
    "bernoulli": _share,
    "normal": _mean_and_half,
    "uniform": lambda first, rest, there: sum(rest[:2]) / 2 if len(rest) > 1 else 0.5,
    "exponential": lambda *_: 1.0,
    "poisson": lambda first, rest, there: first,
}
"""By the name of an operation, without "_" and "_like", what it draws: from its first argument, the others, and what it
drew."""


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    ranks = {torch.float64: 0, torch.float32: 1}
    coarsest = max(one, other, key=lambda dtype: ranks.get(dtype, 2))
    return coarsest if coarsest in ranks else torch.bfloat16
