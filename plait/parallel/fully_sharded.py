"""Parameters split by rows over the ranks of `shard`: torch's FSDP2, with its averaging off.

Importing this module takes most of a second (DTensor, sympy), so sharding.py and replicate.py import it only for
layouts that split parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from plait.layout import Layout
from plait.model.gpt import GPT, mixtures_of
from plait.model.linear import HALF_DTYPES, Linear
from plait.model.mixture import Experts
from plait.model.names import HEAD
from plait.model.router import Router
from plait.parallel.collectives import (
    SPREAD_TAG,
    SUM_TAG,
    MessageBegin,
    all_gather,
    reduce_scatter,
    spread_own,
    sum_parts,
)
from plait.parallel.gradient_buckets import BUCKET_BYTES, SharedWeight, whole_units
from plait.parallel.gradient_reducer import GradientReducer, ProcessGroups
from plait.parallel.mesh import make_groups
from plait.parallel.reduction import Transfer
from plait.parallel.sharded_model import ShardedModel, held_weight
from plait.parallel.watched import WATCH, PendingSpan
from plait.partition.boxes import all_expert_splits
from plait.partition.execution import Execution


def split_parameters(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> None:
    """Hand each layer, and what lies outside of the layers, to FSDP2."""
    policy = _policy(execution)
    apart = _experts_mesh(execution)
    for chunk in sharded.chunks:
        whole = _whole_experts(chunk, execution)
        again = not keeps_all_gathered(execution.layout)
        for layer in chunk.layers.values():
            for router in [module for module in layer.modules() if isinstance(module, Router)]:
                # Gathered as it is kept: a rounded router sends tokens to other experts.
                exact = replace(policy, param_dtype=None)
                fully_shard(router, mesh=mesh["shard"], reshard_after_forward=again, mp_policy=exact)
                _hide_hooks_from_recompute(router)
            for experts in [module for module in layer.modules() if apart and isinstance(module, Experts)]:
                fully_shard(experts, mesh=apart, reshard_after_forward=again, mp_policy=policy)
                _hide_hooks_from_recompute(experts)
            fully_shard(layer, mesh=mesh["shard"], reshard_after_forward=again, mp_policy=policy, ignored_params=whole)
        # What is outside of the layers stays gathered: the loss uses the head after the forward. The embedding and the
        # norm are gathered as they are kept: rounded rows would round the stream, and each addition to their gradient.
        outside = replace(policy, param_dtype=None)
        if (head := _separate_head(chunk)) is not None:
            # A product rounds the head for itself. Its gradient, a sum over all tokens, could overflow in float16.
            own = policy if execution.arithmetic.precision == "bf16" else outside
            fully_shard(head, mesh=mesh["shard"], reshard_after_forward=False, mp_policy=own)
            _gather_before_norm(chunk, head)
        fully_shard(chunk, mesh=mesh["shard"], reshard_after_forward=False, mp_policy=outside, ignored_params=whole)
        sum_gradients_of(chunk, execution.device)
        if execution.device == "cpu" and execution.layout.pipeline == 1:
            # An evaluation ends before the layers for prediction ahead.
            ahead = {id(module) for own in _ahead_layers(chunk) for module in own.modules()}
            gather_ahead([module for module in sharded_modules(chunk) if id(module) not in ahead])


def sum_gradients_of(model: nn.Module, device: str) -> None:
    """Let FSDP2 add up the gradients of its units in a model, and divide them by nothing: Note [loss is a sum]."""
    for module in sharded_modules(model):
        # Neither is recursive.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if device == "cpu":
            module.set_custom_all_gather(SpreadWeights())  # pyright: ignore[reportArgumentType]
            module.set_custom_reduce_scatter(SwapGradients())  # pyright: ignore[reportArgumentType]


def announce_messages(unit: FSDPModule, device: str, gathered: MessageBegin, summed: MessageBegin) -> None:
    """Have a unit's messages heard of by these as they begin; on processors they take their tags from them, and wait
    only once what these return has been called."""
    gather, swap = (SpreadWeights, SwapGradients) if device == "cpu" else (DeviceGather, DeviceReduceScatter)
    unit.set_custom_all_gather(gather(gathered))  # pyright: ignore[reportArgumentType]
    unit.set_custom_reduce_scatter(swap(summed))  # pyright: ignore[reportArgumentType]


def gather_ahead(units: Sequence[FSDPModule]) -> None:
    """Let the next unit's weights travel under a unit's arithmetic, as streams of a GPU do by themselves; the first is
    the whole model."""
    root, *others = units
    root._set_unshard_async_op(True)  # pyright: ignore[reportPrivateUsage]
    for unit, following in pairwise(others):
        unit.set_modules_to_forward_prefetch([following])


def _separate_head(chunk: GPT) -> Linear | None:
    """The head, if only the loss after the final norm works with it: no embedding, and no objective beside the next
    token."""
    return None if chunk.norm is None or chunk.shape.objectives.weights else chunk.head


def _gather_before_norm(chunk: GPT, head: Linear) -> None:
    """Let the head, a unit that has no forward of its own, take the place of the final norm's: it is gathered before
    the norm, under the last layer, and its gradient is summed after the norm's backward, under the layers'."""
    norm = chunk.norm
    assert norm is not None
    head.forward = norm.forward

    def forward(stream_nd: Tensor) -> Tensor:
        """The norm as a call of the head, whose hooks belong to the unit."""
        return head(stream_nd)

    norm.forward = forward


def _hide_hooks_from_recompute(inside_layer: nn.Module) -> None:
    """Have the hooks of a module inside a layer run unseen by "selective" recomputation, which from torch 2.13 on wants
    the layer's second run to call the operations of the first: these gather weights in one run and not in the other."""

    def unseen(hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return hook(*args, **kwargs)

        return run

    for hooks in (inside_layer._forward_pre_hooks, inside_layer._forward_hooks):
        hooks.update({key: unseen(hook) for key, hook in hooks.items()})


def _experts_mesh(execution: Execution) -> DeviceMesh | None:
    """The ranks that split this one's experts, where they are some of those that split all else. Every rank must call
    it."""
    sets = all_expert_splits(execution.layout)
    if not sets:
        return None
    (group,) = make_groups(sets).values()
    return DeviceMesh.from_group(group, execution.device)


def _whole_experts(chunk: GPT, execution: Execution) -> set[nn.Parameter]:
    """The weights of experts that no other rank of `shard` holds: they stay whole, as do their sums."""
    layout = execution.layout
    if layout.expert == 1 or layout.expert_shards > 1:
        return set()
    return {weight for one in mixtures_of(chunk).values() for weight in one.experts.parameters()}


def _policy(execution: Execution) -> MixedPrecisionPolicy:
    """In what numbers weights are gathered and gradients summed; the shards themselves and their sums stay float32.

    Under autocast a run in 16 bits would keep a rounded copy of each weight from the forward to the backward, on every
    rank; gathered in 16 bits, weights are their own rounded copies and are freed together with the gathered layer.
    """
    rounded = HALF_DTYPES.get(execution.arithmetic.precision)
    # FSDP2 rounds before its library's sum, which for bfloat16 rounds after every addition.
    summed = torch.bfloat16 if execution.arithmetic.gradient_transfer == "bf16" else torch.float32 if rounded else None
    # The stream between layers stays float32, as in every other layout.
    return MixedPrecisionPolicy(param_dtype=rounded, reduce_dtype=summed, cast_forward_inputs=False)


def _ahead_layers(chunk: GPT) -> list[nn.Module]:
    return [layer for number, layer in chunk.layers.items() if int(number) >= chunk.shape.layers]


def fully_sharded(
    sharded: ShardedModel,
    layout: Layout,
    weights: Sequence[SharedWeight],
    groups: ProcessGroups,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    transfer: Transfer = "float32",
) -> ShardedModel:
    """What a rank holds and updates once its split parameters have memory. Every rank must call it.

    `weights` are the chunks' own, each with the ranks that keep the same rows of it.
    """
    # Where a weight has fewer rows than there are ranks, some have nothing of it.
    held = [one for one in map(rows_of, weights) if one.local.box.numbers]
    rows = [one for one in held if one.local.trained]
    local = [one.local for one in rows]
    # What is outside of a chunk's layers is torch's one unit for all of it, whose gradients come last of the chunk's;
    # a head of its own has the first.
    separate = [_separate_head(chunk) is not None for chunk in sharded.chunks]

    def turn(one: SharedWeight) -> int:
        return 2 if one.name == HEAD and separate[one.chunk] else int(one.name.startswith("layers."))

    reached = sorted(local, key=lambda one: (one.chunk, turn(one)))
    reducer = GradientReducer(reached, groups, bucket_bytes=bucket_bytes, transfer=transfer)
    return replace(
        sharded,
        weights=tuple(held_weight(one.local.name, one.local.parameter, one.local.box) for one in held),
        units=tuple(whole_units(local)),
        gradients=ShardedGradients(
            sharded.chunks,
            rows,
            reducer,
            lasting_units(sharded.chunks, layout),
            sums="each step" if layout.shard_what == "master-weights" else "each micro-batch",
        ),
    )


def keeps_all_gathered(layout: Layout) -> bool:
    """Whether layers stay gathered from a step's first forward to its last backward. In a pipeline they always do, as
    several micro-batches are under way, and each would gather the weights again."""
    return layout.pipeline > 1 or layout.shard_what != "parameters"


def lasting_units(chunks: Sequence[GPT], layout: Layout) -> list[list[FSDPModule]]:
    """The units of each chunk whose weights stay gathered from a step's first forward to its last backward.

    What lies outside of layers is there at the fullest moment of each micro-batch anyway, until the loss, so gathering
    it once a step takes no more memory. The same holds for all units of a pipeline.
    """
    if keeps_all_gathered(layout):
        return [sharded_modules(chunk) for chunk in chunks]
    layers = [{id(module) for layer in chunk.layers.values() for module in layer.modules()} for chunk in chunks]
    return [
        [unit for unit in sharded_modules(chunk) if id(unit) not in inside]
        for chunk, inside in zip(chunks, layers, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRows:
    """This rank's rows of a split weight: as torch keeps them, and as a plain parameter in the same memory."""

    sharded: nn.Parameter
    local: SharedWeight


class ShardedGradients:
    """Gradients of split parameters: torch sums them over `shard`, and a reducer over those who keep the same rows.

    The reducer's sums begin while backward goes on: torch calls a split parameter's hooks, on the stream of its
    reduce-scatter, once the rows' gradient is there.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        rows: Sequence[WeightRows],
        reducer: GradientReducer,
        lasting: Sequence[Sequence[FSDPModule]] = (),
        sums: Literal["each micro-batch", "each step"] = "each micro-batch",
    ) -> None:
        self._chunks, self._rows, self._reducer, self._lasting, self._sums = chunks, rows, reducer, lasting, sums
        self.buckets = reducer.buckets
        for one in rows if self.buckets else ():
            one.sharded.register_post_accumulate_grad_hook(lambda _, one=one: reducer.arrived(one.local))

    def open(self) -> None:
        """Begin a step: no gradient yet, and no weight that was gathered before its rows were loaded or updated."""
        self._reducer.open()
        self.publish()
        for one in self._rows:
            room = one.local.parameter.grad  # a bucket's, where others keep the same rows
            one.sharded.grad = None if room is None else _as_rows(room, one.sharded)
        for chunk in range(len(self._lasting)):
            self._set_last(chunk, False)

    def arm(self, chunk: int) -> None:
        """Each micro-batch's gradients are summed over `shard`, or the step's; over the others that keep the same rows
        only once in any case."""
        self._reducer.arm(chunk)
        if self._lasting:
            self._set_last(chunk, True)

    def _set_last(self, chunk: int, is_last: bool) -> None:
        """Whether the chunk's next backward is its last of the step, after which what lasted is no longer needed."""
        for unit in self._lasting[chunk]:
            unit.set_reshard_after_backward(is_last, recurse=False)
        if self._sums == "each step":
            for unit in sharded_modules(self._chunks[chunk]):
                unit.set_requires_gradient_sync(is_last, recurse=False)

    def close(self) -> None:
        """Wait until the gradient of every rank's rows is the global sum."""
        for one in self._rows:
            if one.sharded.grad is not None and one.local.parameter.grad is None:
                one.local.parameter.grad = _local(one.sharded.grad)
        self._reducer.close()

    def publish(self) -> None:
        """Forget weights that are still gathered, as after an evaluation: the next forward gathers the new ones."""
        for chunk in self._chunks:
            for module in sharded_modules(chunk):
                module.reshard()

    def settle(self) -> None:
        """The rows that this rank keeps are where they were updated."""


def rows_of(weight: SharedWeight) -> WeightRows:
    """This rank's rows of a weight that FSDP2 has split, or of a whole one."""
    local, box = _local(weight.parameter.detach()), weight.box
    offset = (box.offset[0] + _first_row(weight.parameter), *box.offset[1:])
    box = replace(box, offset=offset, extent=tuple(local.shape))
    own = nn.Parameter(local, requires_grad=weight.trained)
    return WeightRows(sharded=weight.parameter, local=replace(weight, parameter=own, box=box, split=None))


def _first_row(parameter: nn.Parameter) -> int:
    """Rows before this rank's: torch.chunk gives each rank the same number, rounded up, until there are none left."""
    if not isinstance(parameter, DTensor):  # an expert's, whole
        return 0
    mesh = parameter.device_mesh
    return min(parameter.shape[0], -(-parameter.shape[0] // mesh.size()) * mesh.get_local_rank())


def _local(tensor: Tensor) -> Tensor:
    """A sharded tensor's part on this rank, which of a whole one is all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_rows(local: Tensor, like: Tensor) -> Tensor:
    """A rank's rows as the sharded tensor that torch adds gradients to; of a whole weight as they are."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The units that FSDP2 gathers as one, the whole model first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


# FSDP2's gathers and scatters between processors by point-to-point messages, in place of gloo's slower collectives.
#
# See Note [room first] in collectives.py. torch allows both to be replaced (FSDPModule.set_custom_all_gather); it
# passes as the input of a gather the slice of the output where it belongs.


NO_BUCKET_LIMIT = timedelta(0)
"""No timeout, in torch's convention."""


def _nothing() -> None:
    """Most messages are not compared."""


class AllWork(dist.Work):
    """Several transfers as one torch Work."""

    def __init__(
        self, works: Sequence[dist.Work], before_wait: Callable[[], None] = _nothing, begun: PendingSpan | None = None
    ) -> None:
        super().__init__()
        self._works, self._before_wait, self._begun = works, before_wait, begun

    def wait(self, timeout: timedelta = NO_BUCKET_LIMIT) -> bool:
        """Block until all are over; each may take as long."""
        self._before_wait()
        with WATCH.wait("weights", self._begun):
            for work in self._works:
                work.wait(timeout)
        return True


class _OrdinaryMemory:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An ordinary tensor, as torch's own gather and scatter allocate it."""
        return torch.empty(*size, dtype=dtype, device=device)


class SpreadWeights(_OrdinaryMemory):
    """FSDP2's all-gather: a unit's weights from the parts of all ranks."""

    def __init__(self, begin: MessageBegin = lambda _: (SPREAD_TAG, _nothing)) -> None:
        self._begin = begin

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather in place: the input lies in the output."""
        tag, compare = self._begin(output_tensor.numel())
        watched = WATCH.begin("weights", input_tensor)
        begun = AllWork(spread_own(output_tensor, group, tag), compare, watched)
        if not async_op:
            begun.wait()
        return begun if async_op else None


class SwapGradients(_OrdinaryMemory):
    """FSDP2's reduce-scatter: this rank's part of the sum of a unit's gradients."""

    def __init__(self, begin: MessageBegin = lambda _: (SUM_TAG, _nothing)) -> None:
        self._begin = begin

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Sum over the ranks; blocks, as torch requires here."""
        assert op == dist.ReduceOp.SUM and not async_op, "gradients are sums everywhere: Note [loss is a sum]"
        tag, compare = self._begin(input_tensor.numel())
        with WATCH.exchange("gradient sum", input_tensor):
            sum_parts(output_tensor, input_tensor, group, tag, compare)


class DeviceGather(_OrdinaryMemory):
    """FSDP2's all-gather as torch has it, by the device's library; `begin` hears of each."""

    def __init__(self, begin: MessageBegin) -> None:
        self._begin = begin

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather in place: the input lies in the output."""
        self._begin(output_tensor.numel())
        with WATCH.exchange("weights", input_tensor):
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class DeviceReduceScatter(_OrdinaryMemory):
    """FSDP2's reduce-scatter as torch has it, by the device's library; `begin` hears of each."""

    def __init__(self, begin: MessageBegin) -> None:
        self._begin = begin

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum over the ranks."""
        self._begin(input_tensor.numel())
        with WATCH.exchange("gradient sum", input_tensor):
            return reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
