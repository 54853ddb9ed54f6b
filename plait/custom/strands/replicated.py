"""Every worker has all weights: plait's reducer sums gradients, bucket by bucket, while backward goes on. Each worker
updates all of them, or an equal part (ZeRO-1), after which weights are gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch.distributed as dist
from torch import nn

from plait.custom.group import Workers
from plait.custom.program import Program
from plait.custom.strands.arrivals import Arrivals
from plait.custom.strands.description import HeldPiece, StrandChoices, StrandForm, require_elementwise
from plait.custom.strands.pieces import check_apart, groups_by_name, update_pieces
from plait.custom.strands.program_strands import LossStrand, Strands, UpdatedPiece, whole_updates
from plait.parallel.gradient_buckets import SharedWeight
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.sharded_model import OptimizerUnit
from plait.partition.boxes import whole_box


def replicated_strands(program: Program, workers: Workers, choices: StrandChoices, form: StrandForm) -> Strands:
    """The strands of layout "replicate", of form "whole", and of layout "shard optimizer", of form "cut"."""
    if form == "cut":
        for optimizer in program.optimizers:
            require_elementwise(optimizer, "shard optimizer")
        check_apart(program, "shard optimizer")
    losses = []
    for index in range(len(program.losses)):
        trained, groups = program.trained_by(index), groups_by_name(program, index)
        arrivals = Arrivals(list(trained.values()))
        reducer = reducer_of(trained, workers, choices, form)
        updates = whole_updates(trained) if form == "whole" else own_updates(reducer.split_units())
        if form == "cut":
            update_pieces(program.optimizers_of(index), groups, [one.piece for one in updates])
        losses.append(LossStrand(gradients=reducer, updates=updates, arrivals=arrivals, holds=[reducer]))
    return Strands(program, workers, form, losses)


def reducer_of(
    trained: Mapping[str, nn.Parameter], workers: Workers, choices: StrandChoices, form: StrandForm
) -> GradientReducer:
    """What sums the gradients of weights that every worker has, to update all or a part of them. Every worker must call
    it; where they are cut, the weights move into the memory that travels."""
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
