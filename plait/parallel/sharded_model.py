"""A parallelized model: what each stage takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, nn

from plait.model.weights import describe_weight
from plait.partition.boxes import Box, whole_box

if TYPE_CHECKING:  # people's own programs need none of plait's models
    from plait.model.gpt import GPT
from plait.model.linear import Linear

Forward = Callable[["GPT", Any, Tensor | None], Tensor]
"""Runs a micro-batch through a chunk: takes the previous chunk's stream, if there is one, and returns the next."""

LossOf = Callable[[Tensor, "GPT", Any], Tensor]
"""Maps the stream after the final norm, the chunk with the head, and a micro-batch to its summed loss."""


UpdatedBy = Literal["this rank", "another rank"]
"""Whether this rank updates a weight that it holds."""


class Gradients(Protocol):
    """Makes a step's local gradients global; every rank of the mesh calls the same methods in the same order."""

    @property
    def buckets(self) -> list[Tensor]:
        """Flat tensors that stay from step to step beside weights and moments; empty where there are none."""
        ...

    def open(self) -> None:
        """Begin a step: forget the last one's gradients."""
        ...

    def arm(self, chunk: int) -> None:
        """The next backward through this chunk of the model is its last of the step."""
        ...

    def close(self) -> None:
        """Block until the `.grad` of every unit's parameter is the sum over all ranks."""
        ...

    def publish(self) -> None:
        """Call after the update of the units: begins to send the new weights to all ranks that compute with them."""
        ...

    def settle(self) -> None:
        """Block until every weight that this rank answers for is current; forwards do so by themselves."""
        ...


class LocalGradients:
    """One process: its own sums are the global ones."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.buckets: list[Tensor] = []

    def open(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def arm(self, chunk: int) -> None:
        """Does nothing: no other rank waits for the last backward."""

    def close(self) -> None:
        """Does nothing: there are no transfers to wait for."""

    def publish(self) -> None:
        """Does nothing: no other rank computes with the weights."""

    def settle(self) -> None:
        """Does nothing: the weights are where they were updated."""


class VocabularySplit(Protocol):
    """How the vocabulary lies over ranks: what the loss needs to know of it."""

    first: int
    """Number of the first entry that this rank's head has."""

    def most_entries(self, own: int) -> int:
        """How many entries the rank with most of them has, where this one has `own`: the same number on every rank."""
        ...

    def enter(self, hidden_nd: Tensor, tokens: int) -> Tensor:
        """The hidden states of all `tokens`, from those that this rank has; differentiable."""
        ...

    def largest(self, values: Tensor) -> Tensor:
        """The element-wise maximum over the ranks, in place."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        ...


class WholeVocabulary:
    """A vocabulary whose entries are all on this rank."""

    first = 0

    def most_entries(self, own: int) -> int:
        return own

    def enter(self, hidden_nd: Tensor, tokens: int) -> Tensor:
        return hidden_nd

    def largest(self, values: Tensor) -> Tensor:
        return values

    def sum(self, values: Tensor) -> Tensor:
        return values


class PipelineRunner(Protocol):
    """Carries a step's micro-batches through the stages of a pipeline; every rank of the pipe must call it."""

    def run(self, micros: Sequence[Any], *, forward: Forward, loss_of: LossOf, gradients: Gradients) -> Tensor:
        """Forward and backward of all: [sum of losses, counted tokens] on the last stage's rank, zeros elsewhere."""
        ...

    def evaluate(self, micros: Sequence[Any], *, forward: Forward, loss_of: LossOf) -> Tensor:
        """Forward only, with the same result as `run`."""
        ...

    def settle(self) -> None:
        """Block until this rank has current values of the weights that others update; forwards fetch what they need."""
        ...


WHOLE_VOCABULARY = WholeVocabulary()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeight:
    """A rectangle of a weight in this rank's memory, to be filled or loaded; a frozen one is in no checkpoint. Of a
    quantized one the rectangle is of its layer's blocks, [blocks, bytes]."""

    name: str
    tensor: Tensor
    box: Box
    trained: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptVector:
    """A vector on this rank that no gradient changes, such as a router's bias; `owned` on the one rank that writes it
    to a checkpoint."""

    name: str
    tensor: Tensor
    box: Box
    owned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUnitPart:
    """The rectangle of a weight that begins at number `first` of a unit's flattened parameter."""

    name: str
    box: Box
    first: int

    def within(self, numbers: Tensor) -> Tensor:
        """The rectangle, as a view of the unit's numbers or of their gradient."""
        return numbers.view(-1)[self.first : self.first + self.box.numbers].view(self.box.extent)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerUnit:
    """The numbers that the optimizer updates on this rank; `owned` on one of the ranks that update the same ones."""

    parameter: nn.Parameter
    decays: bool
    owned: bool
    parts: tuple[OptimizerUnitPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """The model of this rank, and how it belongs to the others."""

    chunks: tuple[GPT, ...]
    """The parts of the model on this rank, in the model's order: one, except in a pipeline with virtual stages."""
    weights: tuple[HeldWeight, ...] = ()
    units: tuple[OptimizerUnit, ...] = ()
    gradients: Gradients
    vocabulary: VocabularySplit = WHOLE_VOCABULARY
    pipe: PipelineRunner | None = None
    single_owner: Mapping[str, UpdatedBy] = field(default_factory=dict)
    """Weights that several ranks hold and one of them alone updates: their gradients are not summed over ranks."""
    reports: bool = True
    """Whether this rank's loss enters the global sum: true on one of the ranks that compute the same loss."""
    reports_objectives: bool = True
    """Whether this rank reports the losses of the heads that it holds, on whichever stage of a pipeline."""
    over_sequence: Callable[[Tensor], Tensor] = lambda values: values
    """The sum of values over the ranks that hold parts of the same sequences; each of them must call it."""

    def settle(self) -> None:
        """Block until every number of every weight on this rank is current. Every rank must call it."""
        self.gradients.settle()
        if self.pipe is not None:
            self.pipe.settle()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of all chunks, by their names in the whole model."""
        for chunk in self.chunks:
            yield from chunk.named_parameters()


def quantized_layers(sharded: ShardedModel) -> dict[str, Linear]:
    """The layers whose weights this rank keeps in blocks, by the weights' names."""
    layers = (pair for chunk in sharded.chunks for pair in chunk.named_modules())
    return {f"{path}.weight": one for path, one in layers if isinstance(one, Linear) and one.part is not None}


def unsharded(model: GPT) -> ShardedModel:
    """A whole model in one process, before any stage."""
    return whole_weights((model,))


def whole_weights(chunks: tuple[GPT, ...]) -> ShardedModel:
    """Parts of a model whose weights are all whole and this rank's own; those that learn are updated."""
    named = [(name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters()]
    trained = [(describe_weight(name, chunks[0].shape), p) for name, p in named if p.requires_grad]
    return ShardedModel(
        chunks=chunks,
        weights=tuple(held_weight(name, p, whole_box(p.shape)) for name, p in named),
        units=tuple(plain_unit(one.name, p, whole_box(p.shape), decays=one.decays, owned=True) for one, p in trained),
        gradients=LocalGradients([p for _, p in trained]),
    )


def held_weight(name: str, parameter: nn.Parameter, box: Box) -> HeldWeight:
    """A parameter as a rectangle to be filled or loaded."""
    return HeldWeight(name=name, tensor=parameter.detach(), box=box, trained=parameter.requires_grad)


def plain_unit(name: str, parameter: nn.Parameter, box: Box, *, decays: bool, owned: bool) -> OptimizerUnit:
    """A unit that is one weight, or a rectangle of it."""
    part = OptimizerUnitPart(name=name, box=box, first=0)
    return OptimizerUnit(parameter=parameter, decays=decays, owned=owned, parts=(part,))
