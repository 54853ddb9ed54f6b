"""Every worker has all weights and updates an equal part of them (ZeRO-1): gradients are scattered, weights
gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch.distributed as dist
from torch import Tensor, nn

from plait.custom.group import Workers
from plait.custom.program import Program
from plait.custom.strands.arrivals import Arrivals
from plait.custom.strands.description import HeldPiece, Releasable, StrandChoices, StrandForm, require_elementwise
from plait.custom.strands.local import squares_of
from plait.custom.strands.pieces import check_apart, groups_by_name, update_pieces, whole_of
from plait.custom.strands.replicated import shared_weight
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.sharded_model import OptimizerUnit


class ShardedOptimizerStrands:
    """The strands of layout "shard optimizer"."""

    form: StrandForm = "cut"

    def __init__(self, program: Program, workers: Workers, choices: StrandChoices) -> None:
        for optimizer in program.optimizers:
            require_elementwise(optimizer, "shard optimizer")
        check_apart(program, "shard optimizer")
        self._program, self._workers = program, workers
        self._trained = [program.trained_by(index) for index in range(len(program.optimizers))]
        self._arrivals = [Arrivals(list(trained.values())) for trained in self._trained]
        self._reached: list[dict[str, bool]] = [{} for _ in self._trained]
        groups = [groups_by_name(program, index) for index in range(len(program.optimizers))]
        self._reducers = [_split_reducer(trained, workers, choices) for trained in self._trained]
        self._units = [reducer.split_units() for reducer in self._reducers]
        self._own = [_own_pieces(units) for units in self._units]
        for optimizer, of_name, own in zip(program.optimizers, groups, self._own, strict=True):
            update_pieces(optimizer, of_name, [one.piece for one in own])

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
        by_anybody = self._reached[index] = dict(zip(self._trained[index], reached, strict=True))
        for one in self._own[index]:
            whole = one.unit.parameter.grad
            assert whole is not None
            part = whole[one.begin : one.begin + one.piece.parameter.numel()]
            one.piece.parameter.grad = part if by_anybody[one.piece.name] else None

    def own_seconds(self, passed_s: float) -> float:
        return passed_s

    def squares(self, index: int) -> Tensor:
        gradients = [p.grad for one in self._own[index] if (p := one.piece.parameter).grad is not None]
        return self._workers.sums(squares_of(gradients, self._workers.device))

    def publish(self, index: int) -> None:
        self._reducers[index].publish()
        self._reducers[index].settle()  # a program may read its weights right after the step

    def pieces(self, index: int) -> Sequence[HeldPiece]:
        return [one.piece for one in self._own[index]]

    def full_weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._program.named_parameters().items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._program.named_parameters().items():
            parameter.detach().copy_(weights[name])

    def full_gradients(self, index: int) -> dict[str, Tensor]:
        own = {
            one.piece.name: (one.piece.first, one.piece.parameter.grad)
            for one in self._own[index]
            if one.piece.parameter.grad is not None
        }
        like = {name: p for name, p in self._trained[index].items() if self._reached[index].get(name)}
        return whole_of(own, like, self._workers)

    def holds(self) -> Sequence[Releasable]:
        return (*self._reducers, *self._arrivals)


class _OwnPiece:
    """A piece, and where its numbers begin in the unit that holds them."""

    def __init__(self, unit: OptimizerUnit, name: str, first: int, begin: int, numbers: int) -> None:
        self.unit, self.begin = unit, begin
        self.piece = HeldPiece(
            name=name, first=first, parameter=nn.Parameter(unit.parameter.data[begin : begin + numbers])
        )


def _split_reducer(trained: dict[str, nn.Parameter], workers: Workers, choices: StrandChoices) -> GradientReducer:
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    weights = [shared_weight(name, parameter, (workers.rank,)) for name, parameter in trained.items()]
    return GradientReducer(weights, {}, world, choices.bucket_bytes, choices.transfer, room="moved")


def _own_pieces(units: Sequence[OptimizerUnit]) -> list[_OwnPiece]:
    """This worker's part of each weight; a unit holds runs of them one after the other."""
    found = []
    for unit in units:
        for name, parts in groupby(unit.parts, key=lambda part: part.name):
            rectangles = list(parts)
            first, numbers = rectangles[0].box.offset[0], sum(part.box.numbers for part in rectangles)
            found.append(_OwnPiece(unit, name, first, rectangles[0].first, numbers))
    return found
