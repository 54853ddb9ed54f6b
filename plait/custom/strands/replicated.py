"""Every worker has all weights: gradients are summed by plait's reducer, bucket by bucket, while backward goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from plait.custom.group import Workers
from plait.custom.program import Program
from plait.custom.strands.arrivals import Arrivals
from plait.custom.strands.description import HeldPiece, Releasable, StrandChoices, StrandForm
from plait.custom.strands.local import squares_of, whole_pieces
from plait.parallel.gradient_buckets import SharedWeight
from plait.parallel.gradient_reducer import GradientReducer
from plait.partition.boxes import whole_box


class ReplicatedStrands:
    """The strands of layout "replicate"."""

    form: StrandForm = "whole"

    def __init__(self, program: Program, workers: Workers, choices: StrandChoices) -> None:
        self._program = program
        self._trained = [program.trained_by(index) for index in range(len(program.optimizers))]
        everybody = tuple(range(workers.size))
        self._reducers = [_reducer(trained, everybody, choices) for trained in self._trained]
        self._arrivals = [Arrivals(list(trained.values())) for trained in self._trained]

    def open(self, index: int) -> None:
        self._reducers[index].open()
        self._arrivals[index].open()

    def next_pass(self, index: int) -> None:
        self._arrivals[index].next_pass()

    def arm(self, index: int) -> None:
        if self._arrivals[index].once:
            self._reducers[index].arm(0)

    def reached(self, index: int) -> Tensor:
        return self._arrivals[index].reached()

    def close(self, index: int, reached: Sequence[bool]) -> None:
        self._reducers[index].close()
        for parameter, by_anybody in zip(self._trained[index].values(), reached, strict=True):
            if not by_anybody:
                parameter.grad = None

    def own_seconds(self, passed_s: float) -> float:
        return passed_s

    def squares(self, index: int) -> Tensor:
        return squares_of([p.grad for p in self._trained[index].values() if p.grad is not None])

    def publish(self, index: int) -> None:
        """Every worker has made the same update."""

    def pieces(self, index: int) -> Sequence[HeldPiece]:
        return whole_pieces(self._trained[index])

    def full_weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._program.named_parameters().items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._program.named_parameters().items():
            parameter.detach().copy_(weights[name])

    def full_gradients(self, index: int) -> dict[str, Tensor]:
        return {name: p.grad.detach() for name, p in self._trained[index].items() if p.grad is not None}

    def holds(self) -> Sequence[Releasable]:
        return (*self._reducers, *self._arrivals)


def _reducer(trained: dict[str, nn.Parameter], everybody: tuple[int, ...], choices: StrandChoices) -> GradientReducer:
    weights = [shared_weight(name, parameter, everybody) for name, parameter in trained.items()]
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    return GradientReducer(weights, {everybody: world}, None, choices.bucket_bytes, choices.transfer, room="moved")


def shared_weight(name: str, parameter: nn.Parameter, ranks: tuple[int, ...]) -> SharedWeight:
    """A whole weight that these ranks have; its box is the run of all its numbers, whatever its dims."""
    box = whole_box((parameter.numel(),))
    return SharedWeight(name=name, parameter=parameter, box=box, chunk=0, ranks=ranks, decays=True)
