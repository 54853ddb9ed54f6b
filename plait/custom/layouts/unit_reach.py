"""Records which weights of units a backward pass has reached: torch's FSDP2 sums zeros for the others of a unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

UnreachedWeights = Literal["summed as zeros", "left out"]
"""How weights that a worker has not reached enter the sum of a unit's gradients."""


def sum_zeros(units: Sequence[FSDPModule]) -> UnreachedWeights:
    """Have units count unreached weights as zeros, where this torch can (2.13), so that workers may reach unlike
    ones."""
    for unit in units:
        ask = getattr(unit, "set_reduce_scatter_unused_params", None)
        if ask is None:
            return "left out"
        ask(True, recurse=False)
    return "summed as zeros"


class UnitReach:
    """The weights that this worker's backward passes have reached since `open`."""

    def __init__(self, others: UnreachedWeights) -> None:
        self.names: set[str] = set()
        self.others: UnreachedWeights = others
        self._hooked: set[int] = set()

    def watch(self, unit: nn.Module, prefix: str) -> None:
        """Hear of the gradients of a unit, of whose weights all names begin with `prefix`. They exist as whole tensors
        only from the unit's first call on."""
        unit.register_forward_pre_hook(lambda module, _: self._hook(module, prefix))  # after the one that gathers

    def open(self) -> None:
        """Begin a step."""
        self.names.clear()

    def _hook(self, unit: nn.Module, prefix: str) -> None:
        for name, parameter in unit.named_parameters(prefix):
            if parameter.requires_grad and id(parameter) not in self._hooked and not isinstance(parameter, DTensor):
                self._hooked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.names.add(name))
