"""The layouts that the modules of a user's program can take, and what all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:  # one process needs none of torch.distributed
    from plait.parallel.reduction import Transfer

CustomLayout = Literal["replicate", "shard optimizer", "shard parameters"]
"""How the weights of a person's modules lie over the workers."""


WeightForm = Literal["whole", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPiece:
    """What an optimizer updates on this worker of one weight: its numbers from `first` on, laid end to end in
    `parameter`; all of them and in its own shape where the weight is whole."""

    name: str
    first: int
    parameter: nn.Parameter

    def part_of(self, whole: Tensor) -> Tensor:
        """The piece's numbers in a tensor of the whole weight's shape."""
        own = self.parameter
        return whole.reshape(-1)[self.first : self.first + own.numel()].view(own.shape)


class Releasable(Protocol):
    """Something that holds weights."""

    def release(self) -> None:
        """Let them go; a second call does nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoices:
    """What can be chosen beside the layout: in what numbers gradients travel, how much travels together, and which
    modules are gathered as one where parameters are sharded (names, or "auto": the members of ModuleLists). "full"
    recompute keeps only the inputs of those modules, and runs each a second time in the backward pass."""

    transfer: Transfer = "float32"
    bucket_bytes: int = 8 * 2**20
    units: Literal["auto"] | tuple[str, ...] = "auto"
    recompute: Literal["none", "full"] = "none"


ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
"""torch's optimizers that treat every number alone, so that a part of a weight is updated as the whole would be."""


WHOLE_WEIGHTS = (("torch", "Muon"), ("torch", "Adafactor"), ("plait", "Muon"))
"""Optimizers, by package and class, that look at a whole weight and at no other one."""

UpdateUnit = Literal["numbers", "whole weights", "unknown"]
"""The inputs of an optimizer's update: each number by itself, each weight, or unknown to plait."""


def update_unit(optimizer: object) -> UpdateUnit:
    """The unit that an optimizer treats separately."""
    kind = type(optimizer)
    package = kind.__module__.partition(".")[0]
    if package == "torch" and kind.__name__ in ELEMENTWISE:
        return "numbers"
    return "whole weights" if (package, kind.__name__) in WHOLE_WEIGHTS else "unknown"
