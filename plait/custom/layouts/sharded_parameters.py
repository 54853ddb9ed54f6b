"""Every worker keeps its rows of each weight, gathered unit by unit when they are used (ZeRO-3): torch's FSDP2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from plait.checked_json import one_line
from plait.custom.group import Workers
from plait.custom.layouts.arrivals import Arrivals
from plait.custom.layouts.description import HeldPiece, LayoutChoices
from plait.custom.layouts.parallel_program import ForwardClock, ParallelLoss, ParallelProgram, UpdatedPiece
from plait.custom.layouts.pieces import check_apart, groups_by_name, update_pieces
from plait.custom.layouts.replicated import own_updates, reducer_of
from plait.custom.layouts.unit_reach import UnitReach, sum_zeros
from plait.custom.layouts.units import check_one_dtype, check_shared, find_units, units_text
from plait.custom.layouts.whole_weights import GatheredGradients, as_rows, names_updated_whole, owned_whole
from plait.custom.program import Program
from plait.errors import PlaitError
from plait.parallel.fully_sharded import (
    ShardedGradients,
    WeightRows,
    announce_messages,
    gather_ahead,
    rows_of,
    sharded_modules,
    sum_gradients_of,
)
from plait.parallel.gradient_buckets import SharedWeight
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.sharded_model import OptimizerUnit, plain_unit
from plait.partition.boxes import whole_box


def sharded_program(program: Program, workers: Workers, choices: LayoutChoices) -> ParallelProgram:
    """The program in layout "shard parameters"; the models' parameters become DTensors, whose rows optimizers
    update."""
    if len(program.losses) > 1:
        raise PlaitError(
            f'layout "shard parameters" trains by one loss, and this program has {len(program.losses)}; take '
            '"replicate" or "shard optimizer"'
        )
    whole = names_updated_whole(program, "shard parameters")
    check_apart(program, "shard parameters")
    groups = groups_by_name(program, 0)
    gathered = [unit for model in program.models for unit in _shard(model, workers, choices)]
    reach = _follow_units(program, workers)
    forwards = ForwardClock(gathered) if workers.device.type == "cpu" else None
    rows = {name: _rows(name, p, workers) for name, p in program.named_parameters().items() if p.dim()}
    held = {name: _piece(name, one) for name, one in rows.items()}
    trained = [rows[name] for name in program.trained_names[0] if name in rows]
    # Nobody else keeps these rows, so that there is nothing to sum over others.
    sharded = ShardedGradients(program.models, trained, GradientReducer([one.local for one in trained], {}))
    own = [one for one in trained if one.local.parameter.numel()]
    by_number = [held[one.local.name] for one in own if one.local.name not in whole]
    updates = [UpdatedPiece(piece=piece, source=piece.parameter) for piece in by_number]
    parts = [_part(one) for one in own if one.local.name in whole]
    owned = owned_whole(parts, {name: p for name, p in program.trained_by(0).items() if name in whole}, "nowhere")
    updates += [update for one in owned for update in one.updates]
    # Single numbers have no rows: each worker has them, and one of them updates each, as in "shard optimizer".
    single = {name: p for name, p in program.trained_by(0).items() if not p.dim()}
    numbers = reducer_of(single, workers, choices, "cut")
    updates += own_updates(numbers.split_units())
    update_pieces(program.optimizers, groups, [one.piece for one in updates])
    gradients = _RowsAndNumbers(rows=sharded, numbers=numbers)
    loss = ParallelLoss(
        gradients=GatheredGradients(gradients, owned) if owned else gradients,
        updates=updates,
        arrivals=Arrivals(list(single.values())),
        holds=[numbers],
    )  # torch's FSDP2 does not give weights back, so no rows could be released
    return ParallelProgram(program, workers, "cut", [loss], rows=held, reach=reach, forwards=forwards)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowsAndNumbers:
    """Gradients of rows, and of single numbers, whose sums begin after the backward pass: units' messages go by the
    same connections of GPUs, in the order in which each worker begins them."""

    rows: ShardedGradients
    numbers: GradientReducer

    @property
    def buckets(self) -> list[Tensor]:
        """The flat tensors of both."""
        return [*self.rows.buckets, *self.numbers.buckets]

    def open(self) -> None:
        """Begin a step."""
        self.rows.open()
        self.numbers.open()

    def arm(self, chunk: int) -> None:
        """The next backward is the step's last."""
        self.rows.arm(chunk)

    def close(self) -> None:
        """Wait for the sums."""
        self.rows.close()
        self.numbers.close()

    def publish(self) -> None:
        """Send the new numbers, and forget gathered weights."""
        self.rows.publish()
        self.numbers.publish()

    def settle(self) -> None:
        """Wait for the new numbers."""
        self.rows.settle()
        self.numbers.settle()


def _shard(model: nn.Module, workers: Workers, choices: LayoutChoices) -> list[nn.Module]:
    """Shard a model; returns its units, the model itself where it has none."""
    units = find_units(model, choices.units)
    check_shared(model, units)
    check_one_dtype(model, units)
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(world, workers.device.type, mesh_dim_names=("shard",))
    single = {parameter for parameter in model.parameters() if not parameter.dim()}
    summed = torch.bfloat16 if choices.transfer == "bf16" else None
    policy = MixedPrecisionPolicy(reduce_dtype=summed, cast_forward_inputs=False)
    try:
        for unit in units.values():
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=single)
        fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=single)
    except (ValueError, NotImplementedError) as error:
        raise PlaitError(
            f'layout "shard parameters" is not possible for this model ({one_line(str(error))}); take "shard optimizer"'
        ) from error
    sum_gradients_of(model, workers.device.type)
    if workers.device.type == "cpu":
        gather_ahead(sharded_modules(model))
    workers.say(units_text(units))
    return list(units.values()) or [model]


def _follow_units(program: Program, workers: Workers) -> UnitReach:
    """Compare the order of the units' messages with other workers', and hear which weights are reached."""
    device = workers.device.type
    named = {
        ".".join(filter(None, (prefix.rstrip("."), name))): module
        for prefix, model in program.prefixed_models()
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    }
    reach = UnitReach(sum_zeros(list(named.values())))
    for name, unit in named.items():
        text = name or "what is outside of all units"
        message = workers.order.message
        announce_messages(unit, device, message(f"the weights of {text}"), message(f"the gradients of {text}"))
        assert isinstance(unit, nn.Module)
        reach.watch(unit, name)
    return reach


def _rows(name: str, parameter: nn.Parameter, workers: Workers) -> WeightRows:
    whole = whole_box(parameter.shape)
    return rows_of(SharedWeight(name=name, parameter=parameter, box=whole, chunk=0, ranks=(workers.rank,), decays=True))


def _piece(name: str, rows: WeightRows) -> HeldPiece:
    """This worker's rows as a run of the weight's numbers."""
    box = rows.local.box
    per_row = rows.sharded.shape[1:].numel()
    return HeldPiece(name=name, first=box.offset[0] * per_row, parameter=rows.local.parameter)


def _part(rows: WeightRows) -> OptimizerUnit:
    """This worker's rows of a weight that is updated as a whole."""
    return plain_unit(rows.local.name, rows.local.parameter, as_rows(rows.local.box), decays=True, owned=True)
