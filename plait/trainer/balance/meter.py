"""Measures what a rank does with a step: how long it computes, and how long it waits for others.

Forward and backward of a step lie between the `open` and the `close` of its gradients, and what `close` takes is
waiting. What waits in between is measured apart: for other parts of the batch, whose ranks updated weights or hold some
of them; and, inside a part, for the other stages of a pipeline. (Ranks that cut matrices or sequences wait for each
other in every layer: that counts as computing.) On a GPU all marks are events in its stream, which nobody waits for
before the scalars are fetched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.parallel.pipeline.stage import StagePipe
from plait.parallel.sharded_model import Gradients, ShardedModel
from plait.planner.plan import Plan
from plait.trainer.assemble import Assembly, make_autocast, runners

_FORWARDS = {"none": 3, "selective": 3, "full": 4}
"""Forward passes that a layer's forward and backward cost, by what is computed again."""


class StepClock(Protocol):
    """Marks moments of a rank's computing, on its processor or its GPU."""

    def mark(self) -> Any:
        """This moment."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks, whose work must be done."""
        ...


class CpuStepClock:
    """What Python calls is done when it returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class StreamClock:
    """The clock of a GPU: work is queued long before it runs, so its marks are events in the stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What one rank did with one step, in seconds."""

    compute_s: float
    wait_s: float
    """For other parts of the batch."""
    data_s: float
    inside_s: float = 0.0
    """Waited for others that work on the same part."""


@dataclass(slots=True, kw_only=True)
class _Marks:
    """A step whose moments may still lie ahead of the GPU."""

    opened: Any
    closing: Any = None
    closed: Any = None
    aside: list[tuple[Any, Any]] = field(default_factory=list)
    """Where a forward waited for weights; with sharded parameters, where a layer's forward computed."""
    inside: list[tuple[Any, Any]] = field(default_factory=list)
    """Where a stage of a pipeline waited for another."""
    data_s: float = 0.0


class Meter:
    """Collects the marks of steps; `read` turns them into seconds.

    `layer_forwards` says that the intervals aside are the forwards of layers, which make up a known share of all
    computing: the backward of sharded parameters waits for other ranks at points that only torch knows.
    """

    def __init__(self, clock: StepClock, layer_forwards: int | None = None) -> None:
        self._clock, self._layer_forwards = clock, layer_forwards
        self._marks: list[_Marks] = []
        self._open: _Marks | None = None

    def opened(self) -> None:
        """Forward and backward of a step begin."""
        self._open = _Marks(opened=self._clock.mark())

    def closing(self) -> None:
        """They are over: the rest of the step's sums is waited for."""
        assert self._open is not None
        self._open.closing = self._clock.mark()

    def closed(self) -> None:
        """The gradient is there."""
        assert self._open is not None
        self._open.closed = self._clock.mark()
        self._marks.append(self._open)
        self._open = None

    def fetched(self, data_s: float) -> None:
        """How long the last step had waited for its samples."""
        self._marks[-1].data_s = data_s

    def wait(self, work: dist.Work) -> None:
        """Wait for a transfer between ranks of one data-parallel rank."""
        if self._open is None:
            work.wait()
            return
        begun = self._clock.mark()
        work.wait()
        self._open.inside.append((begun, self._clock.mark()))

    def around(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Set aside what passes between two moments of every forward, by the ways to hook into it."""
        begun: list[Any] = []

        @torch.compiler.disable
        def begin(*_: Any) -> None:
            if self._open is not None:
                begun.append(self._clock.mark())

        @torch.compiler.disable
        def end(*_: Any) -> None:
            if self._open is not None and begun:
                self._open.aside.append((begun.pop(), self._clock.mark()))

        before(module, begin)
        after(module, end)

    @property
    def steps(self) -> int:
        """How many were measured since the last `read`."""
        return len(self._marks)

    def read(self) -> list[StepTimes]:
        """Times of the steps since the last call; on a GPU all work queued before it must be done."""
        marks, self._marks = self._marks, []
        return [self._times(one) for one in marks]

    def _times(self, marks: _Marks) -> StepTimes:
        seconds = self._clock.seconds
        aside, inside = (sum(seconds(*pair) for pair in pairs) for pairs in (marks.aside, marks.inside))
        whole = seconds(marks.opened, marks.closing) - inside
        compute = whole - aside
        if self._layer_forwards is not None:
            compute = min(whole, aside * self._layer_forwards)
        wait = whole - compute + seconds(marks.closing, marks.closed)
        return StepTimes(compute_s=compute, wait_s=wait, data_s=marks.data_s, inside_s=inside)


class MeteredGradients:
    """Another Gradients, whose steps are measured."""

    def __init__(self, inner: Gradients, meter: Meter) -> None:
        self._inner, self._meter = inner, meter
        self.buckets: list[Tensor] = inner.buckets

    def open(self) -> None:
        self._inner.open()
        self._meter.opened()

    def arm(self, chunk: int) -> None:
        self._inner.arm(chunk)

    def close(self) -> None:
        self._meter.closing()
        self._inner.close()
        self._meter.closed()

    def publish(self) -> None:
        self._inner.publish()

    def settle(self) -> None:
        self._inner.settle()


def clock_of(device: torch.device) -> StepClock:
    """The clock for work on a device."""
    return StreamClock() if device.type == "cuda" else CpuStepClock()


def sees_waits(plan: Plan) -> bool:
    """Whether waits inside forward and backward are measured apart from computing. Hooks break a compiled layer's
    graph: that is worth it where shares depend on it, not for reports alone."""
    return plan.layout.shard == 1 or plan.compile == "off" or plan.balance_every_steps > 0


def with_meter(assembly: Assembly, clock: StepClock) -> tuple[Assembly, Meter]:
    """The same rank with a meter in it; before its first step."""
    plan, sharded = assembly.plan, assembly.model
    lockstep = plan.layout.shard > 1 and plan.layout.shard_what == "parameters"
    meter = Meter(clock, _FORWARDS[plan.layout.recompute] if lockstep else None)
    if lockstep and sees_waits(plan):
        _watch_forwards(sharded, meter)
    elif plan.layout.shard > 1 and sees_waits(plan):
        _watch_waits(sharded, meter)
    if isinstance(sharded.pipe, StagePipe):
        sharded.pipe.wait = meter.wait
    sharded = replace(sharded, gradients=MeteredGradients(sharded.gradients, meter))
    run_micros, evaluate_micros = runners(sharded, make_autocast(plan.precision, assembly.device))
    return replace(assembly, model=sharded, run_micros=run_micros, evaluate_micros=evaluate_micros), meter


def _watch_forwards(sharded: ShardedModel, meter: Meter) -> None:
    """From where a layer's weights are gathered to the end of its forward."""
    for chunk in sharded.chunks:
        for layer in chunk.layers.values():
            meter.around(layer, nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook)


def _watch_waits(sharded: ShardedModel, meter: Meter) -> None:
    """Around the hooks that wait for updated weights before a module runs."""
    for chunk in sharded.chunks:
        for module in (*chunk.layers.values(), chunk.embed, chunk.norm):
            if module is not None:
                meter.around(module, _first_of_all, nn.Module.register_forward_pre_hook)


def _first_of_all(module: nn.Module, hook: Callable[..., Any]) -> None:
    module.register_forward_pre_hook(hook, prepend=True)
