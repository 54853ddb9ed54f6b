"""Every worker has all weights: plait's reducer sums gradients, bucket by bucket, while backward goes on. Each worker
updates all of them, or an equal part (ZeRO-1), after which weights are gathered."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

import torch.distributed as dist
from torch import nn

from plait.custom.group import Workers
from plait.custom.layouts.arrivals import Arrivals
from plait.custom.layouts.description import HeldPiece, LayoutChoices, WeightForm
from plait.custom.layouts.parallel_program import ParallelLoss, ParallelProgram, UpdatedPiece, whole_updates
from plait.custom.layouts.pieces import check_apart, groups_by_name, update_pieces
from plait.custom.layouts.whole_weights import GatheredGradients, as_matrix, names_updated_whole, owned_whole
from plait.custom.program import Program
from plait.parallel.gradient_buckets import SharedWeight
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.sharded_model import OptimizerUnit
from plait.partition.boxes import whole_box


def replicated_program(program: Program, workers: Workers, choices: LayoutChoices, form: WeightForm) -> ParallelProgram:
    """The program in layout "replicate" (form "whole") or "shard optimizer" (form "cut")."""
    if form == "whole":
        losses = [_whole_loss(program.trained_by(index), workers, choices) for index in range(len(program.losses))]
        return ParallelProgram(program, workers, form, losses)
    whole = names_updated_whole(program, "shard optimizer")
    check_apart(program, "shard optimizer")
    losses = []
    for index in range(len(program.losses)):
        trained, groups = program.trained_by(index), groups_by_name(program, index)
        arrivals = Arrivals(list(trained.values()))
        reducer = reducer_of(trained, workers, choices, form, whole)
        by_number, by_weight = partition_units(reducer.split_units(), whole)
        owned = owned_whole(by_weight, {name: p for name, p in trained.items() if name in whole}, "everywhere")
        updates = [*own_updates(by_number), *(update for one in owned for update in one.updates)]
        update_pieces(program.optimizers_of(index), groups, [one.piece for one in updates])
        gradients = GatheredGradients(reducer, owned) if owned else reducer
        losses.append(ParallelLoss(gradients=gradients, updates=updates, arrivals=arrivals, holds=[reducer]))
    return ParallelProgram(program, workers, form, losses)


def _whole_loss(trained: Mapping[str, nn.Parameter], workers: Workers, choices: LayoutChoices) -> ParallelLoss:
    arrivals = Arrivals(list(trained.values()))
    reducer = reducer_of(trained, workers, choices, "whole")
    return ParallelLoss(gradients=reducer, updates=whole_updates(trained), arrivals=arrivals, holds=[reducer])


def partition_units(
    units: Sequence[OptimizerUnit], whole: Collection[str]
) -> tuple[list[OptimizerUnit], list[OptimizerUnit]]:
    """The units of weights that are updated number by number, and those of weights that are updated `whole`."""
    by_weight = [unit for unit in units if any(part.name in whole for part in unit.parts)]
    return [unit for unit in units if not any(part.name in whole for part in unit.parts)], by_weight


def reducer_of(
    trained: Mapping[str, nn.Parameter],
    workers: Workers,
    choices: LayoutChoices,
    form: WeightForm,
    whole: Collection[str] = (),
) -> GradientReducer:
    """What sums the gradients of weights that every worker has, to update all or a part of them; `whole` names those
    that are updated as a whole. Every worker must call it; where they are cut, the weights move into the memory that
    travels."""
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    everybody = tuple(range(workers.size))
    ranks, groups, split = (everybody, {everybody: world}, None) if form == "whole" else ((workers.rank,), {}, world)
    weights = [
        SharedWeight(
            name=name,
            parameter=p,
            # Else the run of all its numbers, whatever its dims.
            box=whole_box(as_matrix(p.shape) if name in whole else (p.numel(),)),
            chunk=0,
            ranks=ranks,
            decays=True,
            updated="as a whole" if name in whole else "by number",
        )
        for name, p in trained.items()
    ]
    return GradientReducer(weights, groups, split, choices.bucket_bytes, choices.transfer, room="moved")


def own_updates(units: Sequence[OptimizerUnit]) -> list[UpdatedPiece]:
    """This worker's part of each weight that is cut; a unit holds runs of them one after the other."""
    found = []
    for unit in units:
        for name, parts in groupby(unit.parts, key=lambda part: part.name):
            rectangles = list(parts)
            begin, numbers = rectangles[0].first, sum(part.box.numbers for part in rectangles)
            own = nn.Parameter(unit.parameter.data[begin : begin + numbers])
            piece = HeldPiece(name=name, first=rectangles[0].box.offset[0], parameter=own)
            found.append(UpdatedPiece(piece=piece, source=unit.parameter, begin=begin))
    return found
