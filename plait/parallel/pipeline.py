"""`pipeline` (PP): each rank has some layers; micro-batches pass from rank to rank, and their gradients come back.

The order of work is not decided here: each rank carries out its list of partition/pipeline_schedule.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from plait.data.loader import Micro
from plait.model.gpt import GPT
from plait.model.linear import Linear, Multiply
from plait.model.weights import is_trained
from plait.parallel.compile import outside_graphs
from plait.parallel.gradient_reducer import shared_weights
from plait.parallel.mesh import make_groups
from plait.parallel.pipeline_links import StageLinks, WaitFor, wait_for
from plait.parallel.sharded_model import Forward, Gradients, LossOf, ShardedModel, UpdatedBy, whole_weights
from plait.parallel.tensor import stream_rows
from plait.parallel.tied_embedding import TIED_WEIGHT, TiedEmbeddingEnd
from plait.parallel.watched import WATCH
from plait.partition.boxes import cut_box, model_parts_of, ranks_sharing
from plait.partition.execution import Execution
from plait.partition.pipeline_schedule import Action, ActionLists, schedule_actions
from plait.partition.pipeline_simulation import transfers


def pipeline(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Keep this rank's stages of the model, which must still be on the meta device, and a pipe that runs them."""
    if mesh["pipeline"].size() == 1:
        return sharded
    group, shape = mesh.get_group("pipeline"), execution.shape
    parts = model_parts_of(shape, execution.layout, dist.get_rank(group))
    dtype = next(sharded.chunks[0].parameters()).dtype
    with torch.device("meta"):
        chunks = tuple(GPT(shape, part).to(dtype) for part in parts)
    lend_tables(chunks)
    own = whole_weights(chunks)
    return replace(
        sharded,
        chunks=chunks,
        weights=own.weights,
        units=own.units,
        gradients=own.gradients,
        pipe=StagePipe(chunks, execution, group),
        reports=sharded.reports and chunks[-1].part.ends,
    )


def lend_tables(chunks: Sequence[GPT]) -> None:
    """Let parts on one rank use one table together: Note [one table a rank] in partition/boxes.py."""
    for place, chunk in enumerate(chunks):
        holders = (one for one in chunks[:place] if one.embed is not None or one.head is not None)
        chunk.lenders = tuple(holders) if chunk.part.borrows else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSchedule:
    """One rank's actions in a step with a certain number of micro-batches."""

    own: tuple[Action, ...]
    transfers: tuple[Action, ...]
    """Transfers of all ranks, in order."""
    last: frozenset[Action]
    """Each stage's last whole backward."""


def rank_schedule(lists: ActionLists, rank: int) -> RankSchedule:
    """One rank's part of a schedule."""
    last = {action.stage: action for action in lists[rank] if action.kind == "backward"}
    return RankSchedule(own=lists[rank], transfers=transfers(lists), last=frozenset(last.values()))


class StagePipe:
    """The Pipe of one rank: its chunks, and the schedule for any number of micro-batches.

    `wait` is how it waits for other stages, for whoever wants to know how long; `ends`, on a rank that has one, what a
    tied weight's two ends send each other.
    """

    def __init__(self, chunks: tuple[GPT, ...], execution: Execution, group: dist.ProcessGroup) -> None:
        self.chunks, self.group, self.layout = chunks, group, execution.layout
        self.stages = len(execution.layout.stage_layers)
        self.width = execution.shape.width
        # Of the stream, also under autocast: the residual sums stay in the weights' precision.
        self.dtype = torch.float64 if execution.arithmetic.precision == "float64" else torch.float32
        self.sent_dtype = torch.bfloat16 if execution.arithmetic.stage_transfer == "bf16" else self.dtype
        self.wait: WaitFor = wait_for
        self.ends: TiedEmbeddingEnd | None = None
        self.deferred = DeferredGradients()
        if execution.layout.schedule == "zero-bubble":
            # What these products put aside is no value of a compiled layer's graph.
            multiply = outside_graphs(self.deferred.multiply, execution.arithmetic.compile)
            for chunk in chunks:
                defer_in(chunk, multiply)
        self._scripts: dict[tuple[str, int], RankSchedule] = {}

    def run(self, micros: Sequence[Micro], *, forward: Forward, loss_of: LossOf, gradients: Gradients) -> Tensor:
        """Forward and backward of all: [sum of losses, counted tokens] on the last stage's rank, zeros elsewhere."""
        script = self._script("both", len(micros))
        trip = PipelineStep(self, micros, script, forward, loss_of)
        gradients.open()
        for action in script.own:
            if action in script.last:
                gradients.arm(self.chunk_of(action))
            with WATCH.work(action.kind, stage=action.stage, micro=action.micro):
                trip.take(action)
        with WATCH.work("gradients"):
            trip.finish()
            gradients.close()
        return trip.totals

    @torch.no_grad()
    def evaluate(self, micros: Iterable[Micro], *, forward: Forward, loss_of: LossOf) -> Tensor:
        """Forward only, with the same result as `run`; `micros` must not be empty."""
        micros = tuple(micros)
        script = self._script("forward", len(micros))
        trip = PipelineStep(self, micros, script, forward, loss_of)
        for action in script.own:
            trip.take(action)
        trip.finish()
        return trip.totals

    def settle(self) -> None:
        """Block until every row of this rank's weights that another rank updates is current."""
        if self.ends is not None:
            self.ends.settle()

    def chunk_of(self, action: Action) -> int:
        """The chunk of this rank on which an action works."""
        return action.stage // self.layout.pipeline

    def room_for(self, micro: Micro) -> Tensor:
        """A receive buffer for another stage's result: this rank's rows of the stream [N, width]."""
        rows = stream_rows(micro.inputs.numel(), self.layout.tensor)
        return torch.empty(rows, self.width, dtype=self.sent_dtype, device=micro.inputs.device)

    def _script(self, what: str, micros: int) -> RankSchedule:
        if (what, micros) not in self._scripts:
            layout = self.layout
            lists = schedule_actions(
                layout.schedule, ranks=layout.pipeline, virtual=layout.virtual_stages, micros=micros
            )
            if what == "forward":
                lists = tuple(tuple(action for action in own if action.kind == "forward") for own in lists)
            self._scripts[what, micros] = rank_schedule(lists, dist.get_rank(self.group))
        return self._scripts[what, micros]


class PipelineStep:
    """Carries out a rank's actions of one step, and keeps what a backward needs from its forward."""

    def __init__(
        self, pipe: StagePipe, micros: Sequence[Micro], script: RankSchedule, forward: Forward, loss_of: LossOf
    ) -> None:
        self._pipe, self._micros, self._forward_of, self._loss_of = pipe, micros, forward, loss_of
        self.links = StageLinks(
            script.transfers,
            stages=pipe.stages,
            group=pipe.group,
            room_for=lambda micro: pipe.room_for(micros[micro]),
            wait=pipe.wait,
        )
        tokens, learns = [micro.inputs for micro in micros], torch.is_grad_enabled()
        self.visit = pipe.ends.visit(tokens, pipe.wait, learns=learns) if pipe.ends is not None else None
        self._entered: dict[tuple[int, int], Tensor] = {}
        # Where its graph begins, and not the result itself, whose memory is free once it was sent.
        self._left: dict[tuple[int, int], GradientEdge] = {}
        self.totals = torch.zeros(2, dtype=torch.float64, device=micros[0].inputs.device)

    def take(self, action: Action) -> None:
        """Carry out one action, waiting for what it needs."""
        match action.kind:
            case "forward":
                self._forward(action)
            case "backward-weight":
                self._pipe.deferred.settle((action.stage, action.micro))
            case _:
                self._backward(action)

    def finish(self) -> None:
        """Wait for all that is still under way."""
        self.links.finish()
        if self.visit is not None:
            self.visit.finish()

    def _forward(self, action: Action) -> None:
        pipe, micro, key = self._pipe, self._micros[action.micro], (action.stage, action.micro)
        stream = None
        if action.stage == 0 and self.visit is not None:
            self.visit.before_forward(action.micro)
        if action.stage > 0:
            received = self.links.receive(action._replace(stage=action.stage - 1))
            if torch.is_grad_enabled():
                self._entered[key] = received.requires_grad_()
            stream = received.to(pipe.dtype)  # autograd rounds its gradient, which goes back as this one came
        chunk = pipe.chunks[pipe.chunk_of(action)]
        result = self._forward_of(chunk, micro, stream)
        if action.stage < pipe.stages - 1:
            assert result.dtype == pipe.dtype, f"a stream of {result.dtype}, and the next stage awaits {pipe.dtype}"
            self.links.send(action, result.to(pipe.sent_dtype))
        else:
            result = self._loss_of(result, chunk, micro)
            self._count(result.detach(), micro)
        if torch.is_grad_enabled():
            self._left[key] = get_gradient_edge(result)

    def _backward(self, action: Action) -> None:
        pipe, key = self._pipe, (action.stage, action.micro)
        last = action.stage == pipe.stages - 1
        grad = None if last else self.links.receive(action._replace(stage=action.stage + 1))
        if action.kind == "backward-input":
            pipe.deferred.collect(key)
        torch.autograd.backward(self._left.pop(key), None if grad is None else grad.to(pipe.dtype))
        if action.stage > 0:
            received = self._entered.pop(key)
            assert received.grad is not None
            self.links.send(action, received.grad)
        elif self.visit is not None:
            self.visit.after_backward(action.micro)

    def _count(self, loss: Tensor, micro: Micro) -> None:
        self.totals += torch.stack([loss.double(), micro.counted])


# Products whose weight gradient is made later, for schedules that split the backward pass.
#
# Backward through such a product gives the gradients of its input and bias at once, and puts input and gradient aside;
# `settle` multiplies them when the pipeline has time. The sum of both halves is plain backward, product by product.


DeferredProduct = tuple[nn.Parameter, Tensor, Tensor]
"""A weight [out, in], what it multiplied [..., in], and the gradient of the result [..., out]."""


def defer_in(module: nn.Module, multiply: Multiply) -> None:
    """Let every Linear in a module multiply by `multiply`, that of a `DeferredGradients`."""
    for child in module.modules():
        if isinstance(child, Linear):
            child.product = multiply


class DeferredGradients:
    """One rank's deferred weight gradients, in a queue per backward pass; `collect` opens the next one's queue."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, list[DeferredProduct]] = {}
        self._queue: list[DeferredProduct] | None = None

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product that F.linear returns, in autocast's dtype where autocast is on; nothing is deferred of a frozen
        weight."""
        if not weight.requires_grad:
            return F.linear(x, weight, bias)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        # The cast stands outside, so that autograd casts the input's gradient back.
        product: Tensor = _Product.apply(x.to(dtype), weight, bias, self)  # type: ignore[assignment]
        return product

    def collect(self, key: Hashable) -> None:
        """Open a queue: what backward defers from now on is settled under this key."""
        self._queue = self._queues.setdefault(key, [])

    def put_off(self, weight: nn.Parameter, x: Tensor, grad: Tensor) -> None:
        """Defer the weight gradient of one product; called by its backward."""
        assert self._queue is not None, "a product with a deferred weight gradient needs a queue before its backward"
        self._queue.append((weight, x, grad))

    @torch.no_grad()
    def settle(self, key: Hashable) -> None:
        """Add the gradients that were deferred under the key to each weight's `.grad`, and forget them."""
        queue = self._queues.pop(key)
        while queue:
            weight, x, grad = queue.pop(0)
            _accumulate(weight, grad.flatten(0, -2).T, x.flatten(0, -2))


def _accumulate(weight: nn.Parameter, left: Tensor, right: Tensor) -> None:
    """weight.grad += left @ right, without a second matrix where the dtypes allow it."""
    if weight.grad is None:
        weight.grad = (left @ right).to(weight.dtype)
    elif weight.grad.dtype == left.dtype:
        weight.grad.addmm_(left, right)
    else:
        weight.grad += left @ right


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, deferred: DeferredGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Not as a saved tensor: the parameter itself, not what a hook makes of it, gets the gradient.
        ctx.parameter, ctx.deferred, ctx.bias_dtype = weight, deferred, None if bias is None else bias.dtype
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:  # type: ignore[override]
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_bias = None
        if ctx.bias_dtype is not None:
            grad_bias = grad.flatten(0, -2).sum(0, dtype=torch.promote_types(grad.dtype, torch.float32))
            grad_bias = grad_bias.to(ctx.bias_dtype)
        ctx.deferred.put_off(ctx.parameter, x, grad)
        return grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None, None, grad_bias, None


# The stage that leaves a tied embedding to one end of the pipeline; what travels instead is in tied_embedding.py.


def keep_at_one_end(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Let the rank with the head alone keep a tied weight. Every rank must call it."""
    if not is_kept_at_one_end(execution):
        return sharded
    shape, layout, tensors = execution.shape, execution.layout, range(execution.layout.tensor)
    cuts = [cut_box(TIED_WEIGHT, shape, layout.tensor, index) for index in tensors]
    groups = make_groups(sorted({ranks_sharing(shape, layout, TIED_WEIGHT, box, 0) for box in cuts}))
    owner: dict[str, UpdatedBy] = {}
    for weight in shared_weights(sharded, execution):
        if weight.name == TIED_WEIGHT:
            assert isinstance(sharded.pipe, StagePipe)
            embeds = sharded.chunks[weight.chunk].part.embeds
            sharded.pipe.ends = TiedEmbeddingEnd(weight, groups[weight.ranks], embeds=embeds)
            owner[TIED_WEIGHT] = "another rank" if embeds else "this rank"
    return replace(sharded, single_owner=owner)


def is_kept_at_one_end(execution: Execution) -> bool:
    """Whether there is a tied weight at both ends of a pipeline that learns, on CPUs, without other copies.

    A GPU's links are fast, and where there are more copies, or heads in the middle, one sum for all of them is simpler.
    """
    layout = execution.layout
    at_both_ends = execution.shape.tied and layout.pipeline > 1 and is_trained(TIED_WEIGHT, execution.shape)
    nobody_else = layout.data_parallel_degree * layout.context == 1 and not execution.shape.objectives.heads
    return (
        at_both_ends
        and nobody_else
        and execution.device == "cpu"
        and execution.arithmetic.gradient_transfer == "float32"
    )
