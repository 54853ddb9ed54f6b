"""Observes a running model: the outputs of each layer, random draws, and changes to its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.accelerator import initialized_accelerator, module_of
from plait.custom.program import Program
from plait.custom.structure import leaves

_DROPS = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """Count, sum and sum of absolute values of the floating-point numbers that one call of a layer put out."""

    layer: str
    kind: str
    """The layer's class."""
    numbers: float
    total: float
    absolute: float
    float64: bool
    """Whether all of them were float64, as what went in."""


@dataclass(slots=True, kw_only=True)
class Observations:
    """Observations of a program's forward passes."""

    calls: list[LayerCall] = field(default_factory=list)
    """In the order in which the layers ended."""
    drops: int = 0
    """Dropouts that were set to 0."""
    narrow: bool = False
    """Whether some operation computed in less than float64, be it inside of a layer that puts out float64."""
    random_layers: list[str] = field(default_factory=list)
    """Innermost layers that drew random numbers all the same."""
    changed_views: list[str] = field(default_factory=list)
    """Layers whose output is a view of another tensor and was changed in place afterwards."""


class WithoutDropout(TorchDispatchMode):
    """Sets dropout to 0, also where a function is called and no layer: its masks let everything through unscaled. Notes
    whether anything is computed in less than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.drops, self.narrow = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self._run(func, args, kwargs or {})
        self.narrow = self.narrow or any(one.dtype != torch.float64 for one in _floating(found))
        return found

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is _DROPS.bernoulli_.float:
            # torch divides this mask by the same share, which makes it 1.
            self.drops += 1
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        if func is _DROPS.native_dropout.default:
            self.drops += 1
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if func is _DROPS.native_dropout_backward.default:
            return args[0].clone()
        return func(*args, **kwargs)


@contextmanager
def observe(program: Program) -> Iterator[Observations]:
    """Watch the layers of a program's models in this block, with dropout set to 0."""
    seen, watched = Observations(), _Watch()
    handles = []
    for prefix, model in program.prefixed_models():
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(watched.begin))
            handles.append(module.register_forward_hook(watched.end_of(prefix + name, seen), always_call=False))
    try:
        with WithoutDropout() as mode:
            yield seen
        seen.drops, seen.narrow = mode.drops, mode.narrow
        seen.changed_views = watched.changed_views()
    finally:
        for handle in handles:
            handle.remove()


class _Watch:
    """The layers that are running, and the views that they put out."""

    def __init__(self) -> None:
        self._states: list[tuple[Tensor, int]] = []
        self._drawn = 0
        self._views: list[tuple[str, Tensor, int]] = []

    def begin(self, module: nn.Module, inputs: Any) -> None:
        self._states.append((_random_state(), self._drawn))

    def end_of(self, name: str, seen: Observations) -> Any:
        def end(module: nn.Module, inputs: Any, outputs: Any) -> None:
            before, drawn = self._states.pop()
            if drawn == self._drawn and not torch.equal(before, _random_state()):
                self._drawn += 1
                seen.random_layers.append(name)
            tensors = list(_floating(outputs))
            if tensors:
                seen.calls.append(_call(name, type(module).__name__, tensors))
            self._views += [(name, one, one._version) for one in tensors if one._is_view()]

        return end

    def changed_views(self) -> list[str]:
        """The layers whose output is a view that was changed after they had ended."""
        return sorted({name for name, tensor, version in self._views if tensor._version > version})


def _call(name: str, kind: str, tensors: Sequence[Tensor]) -> LayerCall:
    values = [tensor.detach().double() for tensor in tensors]
    return LayerCall(
        layer=name,
        kind=kind,
        numbers=float(sum(one.numel() for one in values)),
        total=float(sum(one.sum() for one in values)),
        absolute=float(sum(one.abs().sum() for one in values)),
        float64=all(tensor.dtype == torch.float64 for tensor in tensors),
    )


def _floating(outputs: Any) -> Iterator[Tensor]:
    return (one for one in leaves(outputs) if isinstance(one, Tensor) and one.is_floating_point())


def _random_state() -> Tensor:
    """The states of the generators from which models draw."""
    state, name = torch.get_rng_state(), initialized_accelerator()
    return torch.cat([state, module_of(name).get_rng_state()]) if name else state
