"""Every worker has all weights: plait's reducer sums gradients, bucket by bucket, while backward goes on. Each worker
updates all of them, or an equal part (ZeRO-1), after which weights are gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch.distributed as dist
from torch import Tensor, nn

from plait.custom.group import Workers
from plait.custom.program import Program
from plait.custom.strands.arrivals import Arrivals
from plait.custom.strands.description import HeldPiece, Releasable, StrandChoices, StrandForm, require_elementwise
from plait.custom.strands.local import copy_weights, squares_of, weights_of, whole_pieces
from plait.custom.strands.pieces import check_apart, groups_by_name, update_pieces, whole_of
from plait.parallel.gradient_buckets import SharedWeight
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.sharded_model import OptimizerUnit
from plait.partition.boxes import whole_box


class ReplicatedStrands:
    """The strands of layout "replicate", of form "whole", and of layout "shard optimizer", of form "cut"."""

    def __init__(self, program: Program, workers: Workers, choices: StrandChoices, form: StrandForm) -> None:
        self.form: StrandForm = form
        self._program, self._workers = program, workers
        losses = range(len(program.losses))
        self._trained = [program.trained_by(index) for index in losses]
        self._reached: list[dict[str, bool]] = [{} for _ in losses]
        groups = [groups_by_name(program, index) for index in losses] if form == "cut" else []
        if form == "cut":
            for optimizer in program.optimizers:
                require_elementwise(optimizer, "shard optimizer")
            check_apart(program, "shard optimizer")
        self._arrivals = [Arrivals(list(trained.values())) for trained in self._trained]
        self._reducers = [_reducer(trained, workers, choices, form) for trained in self._trained]
        self._own = [_own_pieces(reducer.split_units()) for reducer in self._reducers]
        for index, of_name in enumerate(groups):
            update_pieces(program.optimizers_of(index), of_name, [one.piece for one in self._own[index]])

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
        if self.form == "whole":
            for name, parameter in self._trained[index].items():
                if not by_anybody[name]:
                    parameter.grad = None
        for one in self._own[index]:
            whole = one.unit.parameter.grad
            assert whole is not None
            part = whole[one.begin : one.begin + one.piece.parameter.numel()]
            one.piece.parameter.grad = part if by_anybody[one.piece.name] else None

    def own_seconds(self, passed_s: float) -> float:
        return passed_s

    def squares(self, index: int) -> Tensor:
        gradients = [p.grad for piece in self.pieces(index) if (p := piece.parameter).grad is not None]
        squares = squares_of(gradients, self._workers.device)
        return squares if self.form == "whole" else self._workers.sums(squares)

    def publish(self, index: int) -> None:
        if self.form == "cut":
            self._reducers[index].publish()
            self._reducers[index].settle()  # a program may read its weights right after the step

    def pieces(self, index: int) -> Sequence[HeldPiece]:
        own = [one.piece for one in self._own[index]]
        return whole_pieces(self._trained[index]) if self.form == "whole" else own

    def full_weights(self) -> dict[str, Tensor]:
        return weights_of(self._program)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        copy_weights(weights, self._program)

    def full_gradients(self, index: int) -> dict[str, Tensor]:
        own = {
            piece.name: (piece.first, piece.parameter.grad)
            for piece in self.pieces(index)
            if piece.parameter.grad is not None
        }
        if self.form == "whole":
            return {name: gradient.detach() for name, (_, gradient) in own.items()}
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


def _reducer(
    trained: dict[str, nn.Parameter], workers: Workers, choices: StrandChoices, form: StrandForm
) -> GradientReducer:
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    everybody = tuple(range(workers.size))
    ranks, groups, split = (everybody, {everybody: world}, None) if form == "whole" else ((workers.rank,), {}, world)
    weights = [
        # The box is the run of all its numbers, whatever its dims.
        SharedWeight(name=name, parameter=p, box=whole_box((p.numel(),)), chunk=0, ranks=ranks, decays=True)
        for name, p in trained.items()
    ]
    return GradientReducer(weights, groups, split, choices.bucket_bytes, choices.transfer, room="moved")


def _own_pieces(units: Sequence[OptimizerUnit]) -> list[_OwnPiece]:
    """This worker's part of each weight; a unit holds runs of them one after the other."""
    found = []
    for unit in units:
        for name, parts in groupby(unit.parts, key=lambda part: part.name):
            rectangles = list(parts)
            first, numbers = rectangles[0].box.offset[0], sum(part.box.numbers for part in rectangles)
            found.append(_OwnPiece(unit, name, first, rectangles[0].first, numbers))
    return found
