"""How the gradients of a program's losses become global, for all layouts, and what this worker updates by them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from plait.custom.group import Workers
from plait.custom.layouts.arrivals import Arrivals
from plait.custom.layouts.description import HeldPiece, Releasable, WeightForm
from plait.custom.layouts.pieces import whole_of
from plait.custom.program import Program, parameters_of
from plait.errors import PlaitError
from plait.parallel.gradient_norm import squares_of
from plait.parallel.sharded_model import Gradients, LocalGradients

if TYPE_CHECKING:  # most of a second of imports
    from plait.custom.layouts.unit_reach import UnitReach

FORWARDS = 3
"""Time of a forward and backward together, in forward passes; all workers' is the same, so shares do not depend on
it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedPiece:
    """A piece, and the parameter that has its gradient among others', from number `begin` on."""

    piece: HeldPiece
    source: nn.Parameter
    begin: int = 0

    def take_gradient(self) -> None:
        """Give the piece its part of the gradient."""
        own, whole = self.piece.parameter, self.source.grad
        if own is not self.source and whole is not None:
            own.grad = whole[self.begin : self.begin + own.numel()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLoss:
    """What sums the gradients of one loss, and what this worker updates by them. `holds` is what has taken hold of
    weights."""

    gradients: Gradients
    updates: Sequence[UpdatedPiece]
    arrivals: Arrivals
    holds: Sequence[Releasable] = ()


class ParallelProgram:
    """A program on its layout. Each loss has a number, `index`.

    Every worker calls the same methods in the same order. After `close` each parameter of an optimizer has as .grad the
    global sum of its numbers, or None where no worker's backward reached it.
    """

    def __init__(
        self,
        program: Program,
        workers: Workers,
        form: WeightForm,
        losses: Sequence[ParallelLoss],
        *,
        rows: Mapping[str, HeldPiece] | None = None,
        reach: UnitReach | None = None,
        forwards: ForwardClock | None = None,
    ) -> None:
        """`form` says whether each worker's optimizer updates whole weights or parts of them; `rows` are this worker's
        part of each weight that no worker has whole, of which `reach` knows which were reached, and whose forward
        passes `forwards` times on processors."""
        self.form: WeightForm = form
        self._program, self._workers, self._losses = program, workers, losses
        self._rows, self._reach, self._forwards = rows or {}, reach, forwards
        self._trained = [program.trained_by(index) for index in range(len(program.losses))]
        self._reached = [dict[str, bool]() for _ in losses]

    def open(self, index: int) -> None:
        """Begin a step of this loss: no gradient yet."""
        self._losses[index].gradients.open()
        if self._reach is not None:
            self._reach.open()
        self.next_pass(index)
        if self._forwards is not None:
            self._forwards.take_s()  # an evaluation's are no part of this step

    def next_pass(self, index: int) -> None:
        """A forward and backward of a part of the step's batch follows."""
        self._losses[index].arrivals.next_pass()

    def arm(self, index: int) -> None:
        """The next backward is the last of this loss in this step: sums may begin."""
        if self._losses[index].arrivals.once:
            self._losses[index].gradients.arm(0)

    def reached(self, index: int) -> Tensor:
        """For each parameter of this loss's optimizer 1 where a backward of this worker gave it a gradient, else 0;
        float64. Call it after the last backward."""
        self._losses[index].arrivals.end_step()
        sharded = self._reach.names if self._reach is not None else frozenset[str]()
        found = [
            name in sharded if name in self._rows else parameter.grad is not None
            for name, parameter in self._trained[index].items()
        ]
        return torch.tensor(found, dtype=torch.float64)

    def check_reached(self, index: int, reach_counts: Sequence[float]) -> None:
        """Raise PlaitError where layout "shard parameters" has summed other weights on one worker than on another, as
        torch does before 2.13; `reach_counts` says how many reached each."""
        partly = [0 < count < self._workers.size for count in reach_counts]
        if self._reach is not None and self._reach.others == "left out" and any(partly):
            name = next(name for name, one in zip(self._trained[index], partly, strict=True) if one)
            raise PlaitError(
                f"{name} got a gradient on some workers and none on others, as where examples decide which layers run; "
                'in layout "shard parameters" that needs torch 2.13: call each layer in every step (with no rows at '
                'all, or times 0), or take "shard optimizer"'
            )

    def close(self, index: int, reached: Sequence[bool]) -> None:
        """Wait for the sums; a parameter that no worker reached has no gradient."""
        self._losses[index].gradients.close()
        by_anybody = self._reached[index] = dict(zip(self._trained[index], reached, strict=True))
        for one in self._losses[index].updates:
            if by_anybody[one.piece.name]:
                one.take_gradient()
            else:
                one.piece.parameter.grad = None

    def own_seconds(self, passed_s: float) -> float:
        """Of the seconds of the last step's forward and backward those in which this worker did not wait for others;
        call it once after each step that is timed."""
        return passed_s if self._forwards is None else min(passed_s, FORWARDS * self._forwards.take_s())

    def squares(self, index: int) -> Tensor:
        """The sum of all squares of this loss's global gradients: 0-dim, float64, the same on all workers."""
        squares = squares_of(self._own_gradients(index), self._workers.device)
        return squares if self.form == "whole" else self._workers.sums(squares)

    def publish(self, index: int) -> None:
        """After the update: exchange the new weights; blocks until every worker has all of them, for a program may read
        its weights right after the step."""
        self._losses[index].gradients.publish()
        self._losses[index].gradients.settle()

    def pieces(self, index: int) -> Sequence[HeldPiece]:
        """The pieces that this worker's optimizer updates, for saving."""
        return [one.piece for one in self._losses[index].updates]

    def pieces_of(self, number: int) -> Sequence[HeldPiece]:
        """The pieces that this worker updates with the optimizer of this number."""
        held = {id(parameter) for parameter in parameters_of(self._program.optimizers[number])}
        return [piece for piece in self.pieces(self._program.loss_of(number)) if id(piece.parameter) in held]

    def full_weights(self) -> dict[str, Tensor]:
        """Every parameter whole, by its name; every worker must call it."""
        named = self._program.named_parameters()
        if not self._rows:
            return {name: parameter.detach() for name, parameter in named.items()}
        self._workers.order.end()
        like = {name: parameter for name, parameter in named.items() if name in self._rows}
        found = whole_of({n: (p.first, p.parameter) for n, p in self._rows.items()}, like, self._workers)
        return {name: found.get(name, parameter.detach()) for name, parameter in named.items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take these whole weights, by name; every worker must call it."""
        for name, parameter in self._program.named_parameters().items():
            if name in self._rows:
                self._rows[name].parameter.detach().copy_(self._rows[name].part_of(weights[name]))
            else:
                parameter.detach().copy_(weights[name])
        if self._rows:
            self.publish(0)  # those that are still gathered are old

    def full_gradients(self, index: int) -> dict[str, Tensor]:
        """Every gradient of this loss whole, after `close`; every worker must call it."""
        own = {p.name: (p.first, p.parameter.grad) for p in self.pieces(index) if p.parameter.grad is not None}
        if self.form == "whole":
            return {name: gradient.detach() for name, (_, gradient) in own.items()}
        self._workers.order.end()
        like = {name: p for name, p in self._trained[index].items() if self._reached[index].get(name)}
        return whole_of(own, like, self._workers)

    def holds(self) -> Sequence[Releasable]:
        """What has taken hold of the models' weights; once all of it is released another run may take them. None of it
        knows the program, which may know the run."""
        return [one for loss in self._losses for one in (*loss.holds, loss.arrivals)]

    def _own_gradients(self, index: int) -> list[Tensor]:
        return [p.parameter.grad for p in self.pieces(index) if p.parameter.grad is not None]


class ForwardClock:
    """How long the forward passes of units take, from where their weights are here: their backward passes wait for
    others at points that only torch knows."""

    def __init__(self, units: Sequence[nn.Module]) -> None:
        self._began = self._s = 0.0
        for unit in units:  # these hooks stand behind those that gather its weights
            unit.register_forward_pre_hook(self._begin)
            unit.register_forward_hook(self._end)

    def take_s(self) -> float:
        """Seconds since the last call."""
        passed_s, self._s = self._s, 0.0
        return passed_s

    def _begin(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: object) -> None:
        self._s += time.perf_counter() - self._began


def local_program(program: Program, workers: Workers) -> ParallelProgram:
    """A program in one process: its own gradients are the global ones."""
    trained = [program.trained_by(index) for index in range(len(program.losses))]
    losses = [
        ParallelLoss(gradients=LocalGradients(list(some.values())), updates=whole_updates(some), arrivals=Arrivals(()))
        for some in trained
    ]
    return ParallelProgram(program, workers, "whole", losses)


def whole_updates(trained: Mapping[str, nn.Parameter]) -> list[UpdatedPiece]:
    """Every weight as one piece."""
    return [UpdatedPiece(piece=HeldPiece(name=name, first=0, parameter=p), source=p) for name, p in trained.items()]
