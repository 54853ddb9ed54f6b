"""Observers of one rank's loop: their list, and those without their own file."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from plait.launch.values.job import RankContext
from plait.launch.values.progress import ProgressReport
from plait.report.memory import LiveTensorPeak, peak_rss_bytes
from plait.report.sinks import Sink
from plait.trainer.assemble import Assembly
from plait.trainer.balance.actions import Rebalancer
from plait.trainer.checkpointing.background import SaveEnd
from plait.trainer.experts.watch import ExpertWatch
from plait.trainer.loop import LoopPhase, Observer
from plait.trainer.state import TrainState

SETTLED_AFTER_STEPS = 3
"""Steps of a start after which what lasts is there: compiled layers, the optimizer's state, caches."""


def rank_observers(
    context: RankContext, assembly: Assembly, balance: Rebalancer, sink: Sink, saved_steps: set[int]
) -> Sequence[Observer]:
    """The observers of a rank, in the order in which they are called; `saved_steps` gets the step of each checkpoint
    that was saved."""
    peak = PeakMemory(assembly, context)

    def at_save(end: SaveEnd) -> None:
        if end.failure:
            return
        saved_steps.add(end.step)
        peak.report()
        if context.rank == 0:
            context.send("saved", step=end.step, seconds=end.blocked_s)

    return (
        published_progress(context.progress),
        # The balancer comes before the measured step: it may replace the assembly's tensors.
        Observer(before_step=balance.before_step, after_step=balance.after_step),
        Observer(before_step=peak.before_step, after_step=peak.after_step, at_save=at_save),
        Observer(at_report=ExpertWatch(sink.note).at_report),
        frozen_garbage(),
    )


def published_progress(progress: ProgressReport) -> Observer:
    """Publishes each step and phase as it begins, so that the last message of a rank that hangs says where it is.
    Phases within a step are published by its meter."""

    def before_step(state: TrainState) -> None:
        progress.step(state.step + 1)
        progress.phase("the fetch of data")

    def at_phase(phase: LoopPhase) -> None:
        progress.phase(phase)
        progress.collective()

    return Observer(before_step=before_step, at_phase=at_phase)


def frozen_garbage() -> Observer:
    """Takes what the first steps leave out of the garbage collector's sight, on all ranks after the same step.

    A full collection visits every object of the process, most of which last: modules, compiled code, plans. Each rank
    would do it at a step of its own, and all others wait for it there.
    """
    taken = 0

    def after_step(_: TrainState) -> None:
        nonlocal taken
        taken += 1
        if taken == SETTLED_AFTER_STEPS:
            gc.collect()  # what the fork server froze stays frozen, and its pages shared
            gc.freeze()

    return Observer(after_step=after_step)


def collect_all() -> None:
    """Free what is garbage, frozen objects included, and freeze what is left."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class PeakMemory:
    """Measures the peak memory of this process's first step; later steps run without measurement."""

    def __init__(self, assembly: Assembly, context: RankContext) -> None:
        self._assembly, self._context = assembly, context
        self._measure: LiveTensorPeak | None = None
        self._peak_bytes: int | None = None

    def before_step(self, _: TrainState) -> None:
        if self._peak_bytes is None:
            self._measure = LiveTensorPeak(self._assembly.device, self._assembly.tensors()).__enter__()

    def after_step(self, _: TrainState) -> None:
        if self._measure is not None:
            self._measure.__exit__(None, None, None)
            self._peak_bytes, self._measure = self._measure.bytes, None
            self.report()

    def report(self) -> None:
        """Send the peaks of all ranks, or nothing before the first step; every rank must call it."""
        if self._peak_bytes is None:
            return
        peaks = self._assembly.sums.gather(torch.tensor([self._peak_bytes, peak_rss_bytes()]))
        if self._context.rank == 0:
            tensor_bytes, rss_bytes = zip(*[peak.tolist() for peak in peaks], strict=True)
            self._context.send("memory", peak_tensor_bytes=tensor_bytes, peak_rss_bytes=rss_bytes)
