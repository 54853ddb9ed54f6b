"""Measures how long a rank computes in a step, and how long it waits for others.

Forward and backward of a step lie between the `open` and the `close` of its gradients, and the time of `close` is
waiting. Waits in between are measured apart: for other data-parallel ranks, which updated weights or hold some of them;
and, within a replica, for the other stages of a pipeline. (Tensor- and context-parallel ranks wait for each other in
every layer: that counts as computing.) On a GPU all marks are events in its stream, which are not waited for before the
scalars are fetched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.accelerator import is_accelerator, is_compiled, module_of, synchronize
from plait.launch.values.progress import NO_REPORT, ProgressReport
from plait.parallel.compile import outside_graphs
from plait.parallel.pipeline import StagePipe
from plait.parallel.sharded_model import Gradients, ShardedModel
from plait.partition.execution import Compile
from plait.planner.plan import Plan
from plait.trainer.assemble import Assembly, make_autocast, make_runners, weight_casts

_FORWARDS = {"none": 3, "selective": 3, "full": 4}
"""Time of a layer's forward and backward together, in forward passes, by recompute mode."""


class StepClock(Protocol):
    """Marks points in a rank's computation, on its processor or its GPU."""

    def mark(self) -> Any:
        """Mark the current point."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two marks; the work before both must be done."""
        ...


class CpuStepClock:
    """The clock of a CPU: an operation is done when its call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class WaitingClock:
    """The clock of an accelerator without events: each mark waits until the work before it is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> float:
        synchronize(self._device)
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class StreamClock:
    """The clock of an accelerator with streams: work is queued long before it runs, so the marks are events in them."""

    def __init__(self, device: torch.device) -> None:
        self._torch = module_of(device)

    def mark(self) -> torch.Event:
        event: torch.Event = self._torch.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.Event, end: torch.Event) -> float:
        return begin.elapsed_time(end) / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """How one rank spent one step, in seconds."""

    compute_s: float
    wait_s: float
    """Waiting for other data-parallel ranks."""
    data_s: float
    inside_s: float = 0.0
    """Waiting for other ranks of the same replica."""


@dataclass(slots=True, kw_only=True)
class _Marks:
    """The marks of one step, which the GPU may not have reached yet."""

    opened: Any
    closing: Any = None
    closed: Any = None
    hook_intervals: list[tuple[Any, Any]] = field(default_factory=list)
    """Intervals in which a forward waited for weights; with sharded parameters, those in which a layer's forward
    computed."""
    inside: list[tuple[Any, Any]] = field(default_factory=list)
    """Intervals in which a pipeline stage waited for another."""
    data_s: float = 0.0


class Meter:
    """Collects the marks of steps; `read` turns them into seconds.

    If `layer_forwards` is given, the hook intervals are the forwards of layers, and computing is `layer_forwards` times
    their sum, at most the whole time: the backward of sharded parameters waits for other ranks at points that only
    torch knows.
    """

    def __init__(
        self, clock: StepClock, layer_forwards: int | None = None, progress: ProgressReport = NO_REPORT
    ) -> None:
        self._clock, self._layer_forwards, self._progress = clock, layer_forwards, progress
        self._marks: list[_Marks] = []
        self._open: _Marks | None = None

    def begin_compute(self) -> None:
        """Mark the beginning of a step's forward and backward."""
        self._progress.phase("forward and backward")
        self._open = _Marks(opened=self._clock.mark())

    def end_compute(self) -> None:
        """Mark the end of forward and backward: from here the rank waits for the rest of the gradient sums."""
        assert self._open is not None
        self._progress.phase("the sum of gradients")
        self._progress.collective()
        self._open.closing = self._clock.mark()

    def end_step(self) -> None:
        """Mark the point where the gradients are complete, which ends the step."""
        assert self._open is not None
        self._progress.phase("the update of weights")
        self._open.closed = self._clock.mark()
        self._marks.append(self._open)
        self._open = None

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Mark the block as one step, all of it computing."""
        self.begin_compute()
        yield
        self.end_compute()
        self.end_step()

    def record_data_wait(self, data_s: float) -> None:
        """Record the seconds that the last step waited for its samples."""
        self._marks[-1].data_s = data_s

    def wait(self, work: dist.Work) -> None:
        """Wait for a transfer between ranks of one replica, and record the interval."""
        if self._open is None:
            work.wait()
            return
        begun = self._clock.mark()
        self._progress.collective()
        work.wait()
        self._open.inside.append((begun, self._clock.mark()))

    def time_between_hooks(
        self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any], compile: Compile = "off"
    ) -> None:
        """Record an interval in every forward of `module`, between two hooks; `before` and `after` register them."""
        begun: list[Any] = []

        def begin(*_: Any) -> None:
            if self._open is not None:
                begun.append(self._clock.mark())

        def end(*_: Any) -> None:
            if self._open is not None and begun:
                self._open.hook_intervals.append((begun.pop(), self._clock.mark()))

        before(module, outside_graphs(begin, compile))
        after(module, outside_graphs(end, compile))

    @property
    def steps(self) -> int:
        """Number of steps measured since the last `read`."""
        return len(self._marks)

    def read(self) -> list[StepTimes]:
        """Times of the steps since the last call; on a GPU all work queued before the call must be done."""
        marks, self._marks = self._marks, []
        return [self._times(one) for one in marks]

    def _times(self, marks: _Marks) -> StepTimes:
        seconds = self._clock.seconds
        aside, inside = (sum(seconds(*pair) for pair in pairs) for pairs in (marks.hook_intervals, marks.inside))
        whole = seconds(marks.opened, marks.closing) - inside
        compute = whole - aside
        if self._layer_forwards is not None:
            compute = min(whole, aside * self._layer_forwards)
        wait = whole - compute + seconds(marks.closing, marks.closed)
        return StepTimes(compute_s=compute, wait_s=wait, data_s=marks.data_s, inside_s=inside)


class MeteredGradients:
    """Wraps a Gradients and measures its steps."""

    def __init__(self, inner: Gradients, meter: Meter) -> None:
        self._inner, self._meter = inner, meter
        self.buckets: list[Tensor] = inner.buckets

    def open(self) -> None:
        self._inner.open()
        self._meter.begin_compute()

    def arm(self, chunk: int) -> None:
        self._inner.arm(chunk)

    def close(self) -> None:
        self._meter.end_compute()
        self._inner.close()
        self._meter.end_step()

    def publish(self) -> None:
        self._inner.publish()

    def settle(self) -> None:
        self._inner.settle()


def clock_of(device: torch.device) -> StepClock:
    """The clock for work on a device."""
    if is_compiled(device):
        return WaitingClock(device)
    return StreamClock(device) if is_accelerator(device) else CpuStepClock()


def measures_waits(plan: Plan) -> bool:
    """Whether waits inside forward and backward are measured apart from computing.

    Hooks break a compiled layer's graph: that is worth it where the ranks' shares depend on the times, not for reports
    alone.
    """
    return plan.placement.layout.shard == 1 or plan.arithmetic.compile == "off" or plan.cadence.balance_every_steps > 0


def attach_meter(assembly: Assembly, clock: StepClock, progress: ProgressReport = NO_REPORT) -> tuple[Assembly, Meter]:
    """This rank's assembly with a meter in it, and the meter; call it before the first step. The phases of a step go to
    `progress`."""
    plan, sharded = assembly.plan, assembly.model
    lockstep = plan.placement.layout.gathers_weights
    meter = Meter(clock, _FORWARDS[plan.placement.layout.recompute] if lockstep else None, progress)
    if lockstep and measures_waits(plan):
        _watch_forwards(sharded, meter, plan.arithmetic.compile)
    elif plan.placement.layout.shard > 1 and measures_waits(plan):
        _watch_waits(sharded, meter, plan.arithmetic.compile)
    if isinstance(sharded.pipe, StagePipe):
        sharded.pipe.wait = meter.wait
    sharded = replace(sharded, gradients=MeteredGradients(sharded.gradients, meter))
    autocast, casts = make_autocast(plan.arithmetic.precision, assembly.device), weight_casts(plan)
    run_micros, evaluate_micros = make_runners(
        sharded,
        autocast,
        casts=casts,
        compile=plan.arithmetic.compile,
        auxiliary=assembly.auxiliary,
        pairs=assembly.pairs,
        scale=assembly.scale,
    )
    return replace(assembly, model=sharded, run_micros=run_micros, evaluate_micros=evaluate_micros), meter


def _watch_forwards(sharded: ShardedModel, meter: Meter, compile: Compile) -> None:
    """Time each layer's forward, from the point where its weights are gathered to its end."""
    for chunk in sharded.chunks:
        for layer in chunk.layers.values():
            before, after = nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook
            meter.time_between_hooks(layer, before, after, compile)


def _watch_waits(sharded: ShardedModel, meter: Meter, compile: Compile) -> None:
    """Time the hooks that wait for updated weights before a module runs."""
    for chunk in sharded.chunks:
        inner = (*chunk.layers.values(), *chunk.auxiliary.values(), *chunk.ahead.values())
        for module in (*inner, chunk.embed, chunk.norm):
            if module is not None:
                meter.time_between_hooks(module, _first_of_all, nn.Module.register_forward_pre_hook, compile)


def _first_of_all(module: nn.Module, hook: Callable[..., Any]) -> None:
    module.register_forward_pre_hook(hook, prepend=True)
