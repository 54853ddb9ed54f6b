"""Every worker keeps its rows of each weight, gathered unit by unit when they are used (ZeRO-3): torch's FSDP2."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from plait.checked_json import one_line
from plait.custom.group import Workers
from plait.custom.program import Program
from plait.custom.strands.description import HeldPiece, Releasable, StrandChoices, StrandForm, require_elementwise
from plait.custom.strands.local import squares_of
from plait.custom.strands.pieces import check_apart, groups_by_name, update_pieces, whole_of
from plait.custom.strands.units import check_one_dtype, check_shared, find_units, units_text
from plait.errors import PlaitError
from plait.parallel.fully_sharded import SpreadWeights, SwapGradients

FORWARDS = 3
"""Time of a forward and backward together, in forward passes; all workers' is the same, so shares do not depend on
it. The backward itself waits for others at points that only torch knows."""


class ShardedParameterStrands:
    """The strands of layout "shard parameters"; the models' parameters become DTensors, whose rows optimizers
    update."""

    form: StrandForm = "cut"

    def __init__(self, program: Program, workers: Workers, choices: StrandChoices) -> None:
        if len(program.losses) > 1:
            raise PlaitError(
                'layout "shard parameters" trains by one loss, and this program has '
                f'{len(program.losses)}; take "replicate" or "shard optimizer"'
            )
        for optimizer in program.optimizers:
            require_elementwise(optimizer, "shard parameters")
        check_apart(program, "shard parameters")
        self._program, self._workers = program, workers
        self._reached: dict[str, bool] = {}
        groups = groups_by_name(program, 0)
        self._forwards = _ForwardClock()
        for model in program.models:
            units = _shard(model, workers, choices)
            for unit in units.values() if units else [model]:
                self._forwards.watch(unit)
        self._sharded = {name: _as_dtensor(p) for name, p in program.named_parameters().items()}
        self._rows = {name: _rows_of(name, p) for name, p in self._sharded.items()}
        self._trained = {name: self._sharded[name] for name in program.trained_names[0]}
        self._pieces = [self._rows[name] for name in self._trained if self._rows[name].parameter.numel()]
        update_pieces(program.optimizers, groups, self._pieces)

    def open(self, index: int) -> None:
        self.publish(index)  # weights that are still gathered, as after an evaluation
        self._forwards.take_s()  # its forward passes are no part of this step
        for parameter in self._trained.values():
            parameter.grad = None

    def next_pass(self, index: int) -> None:
        """Each part's gradients are summed after its own backward."""

    def arm(self, index: int) -> None:
        """Sums begin with each unit's backward."""

    def reached(self, index: int) -> Tensor:
        return torch.tensor([p.grad is not None for p in self._trained.values()], dtype=torch.float64)

    def close(self, index: int, reached: Sequence[bool]) -> None:
        self._reached = dict(zip(self._trained, reached, strict=True))
        for piece in self._pieces:
            gradient = self._sharded[piece.name].grad
            piece.parameter.grad = None if gradient is None else _as_dtensor(gradient).to_local()

    def own_seconds(self, passed_s: float) -> float:
        on_processor = self._workers.device.type == "cpu"
        return min(passed_s, FORWARDS * self._forwards.take_s()) if on_processor else passed_s

    def squares(self, index: int) -> Tensor:
        gradients = [p.parameter.grad for p in self._pieces if p.parameter.grad is not None]
        return self._workers.sums(squares_of(gradients, self._workers.device))

    def publish(self, index: int) -> None:
        for model in self._program.models:
            for module in _sharded_modules(model):
                module.reshard()

    def pieces(self, index: int) -> Sequence[HeldPiece]:
        return self._pieces

    def full_weights(self) -> dict[str, Tensor]:
        return whole_of({n: (p.first, p.parameter) for n, p in self._rows.items()}, self._sharded, self._workers)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, piece in self._rows.items():
            rows = piece.parameter.detach()
            rows.copy_(weights[name].reshape(-1)[piece.first : piece.first + rows.numel()].view_as(rows))
        self.publish(0)

    def full_gradients(self, index: int) -> dict[str, Tensor]:
        own = {p.name: (p.first, p.parameter.grad) for p in self._pieces if p.parameter.grad is not None}
        return whole_of(own, {n: p for n, p in self._trained.items() if self._reached.get(n)}, self._workers)

    def holds(self) -> Sequence[Releasable]:
        """Nothing that could be released: torch's FSDP2 does not give weights back."""
        return ()


class _ForwardClock:
    """How long the forward passes of units take, from where their weights are here."""

    def __init__(self) -> None:
        self._began = self._s = 0.0

    def watch(self, unit: nn.Module) -> None:
        """Time this unit, too: its hooks stand behind those that gather its weights."""
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


def _shard(model: nn.Module, workers: Workers, choices: StrandChoices) -> dict[str, nn.Module]:
    """Shard a model; returns its units."""
    units = find_units(model, choices.units)
    check_shared(model, units)
    check_one_dtype(model, units)
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(world, workers.device.type, mesh_dim_names=("shard",))
    summed = torch.bfloat16 if choices.transfer == "bf16" else None
    policy = MixedPrecisionPolicy(reduce_dtype=summed, cast_forward_inputs=False)
    try:
        for unit in units.values():
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    except (ValueError, NotImplementedError) as error:
        raise PlaitError(
            f'layout "shard parameters" is not possible for this model ({one_line(str(error))}); take "shard optimizer"'
        ) from error
    for module in _sharded_modules(model):
        # Neither is recursive. Gradients are sums everywhere: Note [loss is a sum].
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if workers.device.type == "cpu":
            module.set_custom_all_gather(SpreadWeights())  # pyright: ignore[reportArgumentType]
            module.set_custom_reduce_scatter(SwapGradients())  # pyright: ignore[reportArgumentType]
    if workers.device.type == "cpu":
        _gather_ahead(model)
    workers.say(units_text(units))
    return units


def _gather_ahead(model: nn.Module) -> None:
    """Let the next unit's weights travel under a unit's arithmetic, as streams of a GPU do by themselves."""
    root, *units = _sharded_modules(model)
    root._set_unshard_async_op(True)  # pyright: ignore[reportPrivateUsage]
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])


def _sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _as_dtensor(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor)
    return tensor


def _rows_of(name: str, parameter: DTensor) -> HeldPiece:
    """This worker's rows: torch.chunk gives each the same number, rounded up, until there are none left."""
    local, mesh = parameter.to_local().detach(), parameter.device_mesh
    rows = parameter.shape[0]
    first = min(rows, -(-rows // mesh.size()) * mesh.get_local_rank())
    per_row = parameter.shape.numel() // rows if rows else 0
    return HeldPiece(
        name=name, first=first * per_row, parameter=nn.Parameter(local, requires_grad=parameter.requires_grad)
    )
