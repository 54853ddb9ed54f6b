"""Weights whose update depends on all their elements (Muon, Adafactor), while workers hold parts of them: one
worker, the owner, updates each whole weight with the user's own optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.custom.layouts.description import ELEMENTWISE, CustomLayout, HeldPiece, update_unit
from plait.custom.layouts.parallel_program import UpdatedPiece
from plait.custom.program import Program
from plait.errors import PlaitError
from plait.parallel.sharded_model import Gradients, OptimizerUnit
from plait.parallel.whole_matrices import MatrixExchange
from plait.partition.boxes import Box

# Note [one owner a weight]: the sums of a step's gradients end as they do for any optimizer, in parts. The parts of
# such a weight then go to its owner, and after the update the same parts of the new weight come back. The owner alone
# has the optimizer's state, so that no copy can drift, and its optimizer sees a whole weight, as in one process. Owners
# are balanced by the cost of Muon's products (partition/matrix_owners.py).


def names_updated_whole(program: Program, layout: CustomLayout) -> set[str]:
    """The trained weights that optimizers update as a whole. Raises PlaitError for an optimizer that may need more
    than one weight at a time."""
    found: set[str] = set()
    for optimizer, groups in zip(program.optimizers, program.group_names, strict=True):
        unit = update_unit(optimizer)
        if unit == "unknown":
            raise PlaitError(
                f'layout "{layout}" updates parts of weights, and {type(optimizer).__name__} may need all of them; '
                f'take "replicate", or one of {", ".join(ELEMENTWISE)}, Muon or Adafactor'
            )
        if unit == "whole weights":
            found |= {name for names in groups for name in names}
    learning = {name for names in program.trained_names for name in names}
    return {
        name for name, p in program.named_parameters().items() if name in found & learning and p.dim() and p.numel()
    }


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """The sides of a weight as a matrix: one row for each index of its first dim."""
    rows, *rest = shape
    return rows, torch.Size(rest).numel()


def as_rows(box: Box) -> Box:
    """Rows of a weight as rows of that matrix."""
    shape, extent = as_matrix(box.shape), as_matrix(box.extent)
    return Box(shape=shape, offset=(box.offset[0], 0), extent=extent)


class WholeWeights:
    """Weights of one dtype that are updated as a whole. Every worker must make it and call the same methods.

    `units` are this worker's parts of them, `weights` all of them by name. Where every worker has them whole
    ("everywhere") the owner updates its model's own; else ("nowhere") a weight of its own beside its rows.
    """

    def __init__(
        self,
        units: Sequence[OptimizerUnit],
        weights: Mapping[str, nn.Parameter],
        held: Literal["everywhere", "nowhere"],
    ) -> None:
        world = dist.group.WORLD
        assert isinstance(world, dist.ProcessGroup)
        self._exchange, self._held, self._gathered = MatrixExchange(units, world), held, False
        self._places = [(unit.parameter, part) for unit in units for part in unit.parts]
        self._dtype = next(iter(weights.values())).dtype
        device = next(iter(weights.values())).device
        self._owned: list[nn.Parameter] = []
        self.updates: list[UpdatedPiece] = []
        for task in self._exchange.owned:
            shape = weights[task.name].shape
            own = (
                weights[task.name].detach()
                if held == "everywhere"
                else torch.zeros(shape, dtype=self._dtype, device=device)
            )
            parameter = nn.Parameter(own)
            self._owned.append(parameter)
            piece = HeldPiece(name=task.name, first=0, parameter=parameter)
            self.updates.append(UpdatedPiece(piece=piece, source=parameter))

    def open(self) -> None:
        """Begin a step: no gradient yet."""
        self._gathered = False
        for parameter in self._owned:
            parameter.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        """Send the parts' gradients to the owners, and also the weights where no worker holds them whole; blocks."""
        gradients = [part.within(torch.zeros_like(one) if one.grad is None else one.grad) for one, part in self._places]
        for parameter, whole in zip(self._owned, self._exchange.wholes(gradients, self._dtype), strict=True):
            parameter.grad = whole.view(parameter.shape)
        if self._held == "nowhere":
            rows = [part.within(one.detach()) for one, part in self._places]
            for parameter, whole in zip(self._owned, self._exchange.wholes(rows, self._dtype), strict=True):
                parameter.copy_(whole.view(parameter.shape))
        self._gathered = True

    @torch.no_grad()
    def give_back(self) -> None:
        """Send the owners' new weights back to the parts; blocks. Does nothing if no step has gathered them, as
        after loading."""
        if not self._gathered:
            return
        self._gathered = False
        wholes = [one.detach().view(as_matrix(one.shape)) for one in self._owned]
        for number, new in self._exchange.parts(wholes, self._dtype):
            parameter, part = self._places[number]
            own = part.within(parameter.detach())
            if own.data_ptr() != new.data_ptr():  # else it is the owner's weight itself, which is up to date
                own.copy_(new)


def owned_whole(
    units: Sequence[OptimizerUnit], weights: Mapping[str, nn.Parameter], held: Literal["everywhere", "nowhere"]
) -> list[WholeWeights]:
    """These weights, one WholeWeights for each dtype. Every worker must call it; blocks."""
    kinds: dict[torch.dtype, dict[str, nn.Parameter]] = {}
    for name, parameter in weights.items():
        kinds.setdefault(parameter.dtype, {})[name] = parameter
    return [
        WholeWeights([unit for unit in units if unit.parameter.dtype == dtype], some, held)
        for dtype, some in kinds.items()
    ]


class GatheredGradients:
    """Gradients of which some weights' parts go to one owner each after they are summed; new weights go back after
    the update."""

    def __init__(self, parts: Gradients, wholes: Sequence[WholeWeights]) -> None:
        self._parts, self._wholes = parts, wholes

    @property
    def buckets(self) -> list[Tensor]:
        """The flat tensors of the parts."""
        return self._parts.buckets

    def open(self) -> None:
        """Begin a step."""
        self._parts.open()
        for one in self._wholes:
            one.open()

    def arm(self, chunk: int) -> None:
        """The next backward is the step's last."""
        self._parts.arm(chunk)

    def close(self) -> None:
        """Wait for the sums, and for the gradients that this worker owns."""
        self._parts.close()
        for one in self._wholes:
            one.gather()

    def publish(self) -> None:
        """Send the new weights: from owners to the parts, then from the parts to the workers that compute with them."""
        for one in self._wholes:
            one.give_back()
        self._parts.publish()

    def settle(self) -> None:
        """Wait for the new weights."""
        self._parts.settle()
