"""What strands of a person's modules have in common, and which layouts there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor, nn

from plait.errors import PlaitError

if TYPE_CHECKING:  # one process needs none of torch.distributed
    from plait.parallel.reduction import Transfer

CustomLayout = Literal["replicate", "shard optimizer", "shard parameters"]
"""How the weights of a person's modules lie over the workers."""


StrandForm = Literal["whole", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPiece:
    """What an optimizer updates on this worker of one weight: its numbers from `first` on, laid end to end in
    `parameter`; all of them and in its own shape where the weight is whole."""

    name: str
    first: int
    parameter: nn.Parameter


class Releasable(Protocol):
    """Something that holds weights."""

    def release(self) -> None:
        """Let them go; a second call does nothing."""
        ...


class Strands(Protocol):
    """How the gradients of a program's losses become global, whatever the layout; `index` is the loss's number.

    Every worker calls the same methods in the same order. After `close` each parameter of an optimizer has as .grad the
    global sum of its numbers, or None where no worker's backward reached it.
    """

    form: StrandForm
    """Whether each worker's optimizer updates whole weights or parts of them."""

    def open(self, index: int) -> None:
        """Begin a step of this loss: no gradient yet."""
        ...

    def next_pass(self, index: int) -> None:
        """A forward and backward of a part of the step's batch follows."""
        ...

    def arm(self, index: int) -> None:
        """The next backward is the last of this loss in this step: sums may begin."""
        ...

    def reached(self, index: int) -> Tensor:
        """For each parameter of this loss's optimizer 1 where a backward of this worker gave it a gradient, else 0."""
        ...

    def close(self, index: int, reached: Sequence[bool]) -> None:
        """Wait for the sums; a parameter that no worker reached has no gradient."""
        ...

    def own_seconds(self, passed_s: float) -> float:
        """Of the seconds of the last step's forward and backward those in which this worker did not wait for others;
        call it once after each step that is timed."""
        ...

    def squares(self, index: int) -> Tensor:
        """The sum of all squares of this loss's global gradients: 0-dim, float64, the same on all workers."""
        ...

    def publish(self, index: int) -> None:
        """After the update: exchange the new weights; blocks until every worker has all of them."""
        ...

    def pieces(self, index: int) -> Sequence[HeldPiece]:
        """What this worker's optimizer updates, to save it."""
        ...

    def full_weights(self) -> dict[str, Tensor]:
        """Every parameter whole, by its name; every worker must call it."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take these whole weights, by name; every worker must call it."""
        ...

    def full_gradients(self, index: int) -> dict[str, Tensor]:
        """Every gradient of this loss whole, after `close`; every worker must call it."""
        ...

    def holds(self) -> Sequence[Releasable]:
        """What has taken hold of the models' weights; once all of it is released another run may take them. None of it
        knows the program, which may know the run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StrandChoices:
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


def require_elementwise(optimizer: object, layout: CustomLayout) -> None:
    """Raise PlaitError for an optimizer whose update of a part of a weight may need the rest of it."""
    kind = type(optimizer)
    if kind.__name__ not in ELEMENTWISE or kind.__module__.partition(".")[0] != "torch":
        raise PlaitError(
            f'layout "{layout}" updates parts of weights, and {kind.__name__} may need whole ones; take "replicate", '
            f"or one of {', '.join(ELEMENTWISE)}"
        )
