"""The loop's actions under watch: each says when it begins, and the first step's memory is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from plait.launch.values.copies import CopyStore
from plait.launch.values.progress import ProgressReport
from plait.parallel.sums import Sums
from plait.report.memory import LiveTensorPeak, peak_rss_bytes
from plait.report.sinks import Sink
from plait.trainer.assemble import Assembly
from plait.trainer.divergence import BadStep, NumberGuard
from plait.trainer.loop import LoopActions, LoopIntervals, run_loop
from plait.trainer.state import TrainState, past_skipped
from plait.trainer.step import Scalars
from plait.trainer.watching.planted import with_planted_faults

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class WorkerContext(Protocol):
    """What a worker needs to know about its rank: implemented by launch.values.job.RankContext, and by tests."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_world_size(self) -> int: ...
    @property
    def rendezvous(self) -> str: ...
    @property
    def progress(self) -> ProgressReport: ...
    @property
    def memory(self) -> CopyStore | None: ...
    def send(self, kind: str, **values: Any) -> None: ...
    def stop_requested(self) -> bool: ...


def watched(actions: LoopActions, progress: ProgressReport) -> LoopActions:
    """The same actions; each tells `progress` its phase when it begins. Phases within a step come from its meter."""

    def step(state: TrainState) -> tuple[TrainState, Scalars]:
        progress.step(state.step + 1)
        progress.phase("the fetch of data")
        return actions.step(state)

    return replace(
        actions,
        step=step,
        evaluate=_in_phase("evaluation", actions.evaluate, progress),
        save=_in_phase("saving", actions.save, progress),
        begin_save=_in_phase("saving", actions.begin_save, progress),
        finish_save=_in_phase("saving", actions.finish_save, progress),
        copy=_in_phase("the copy of the state", actions.copy, progress),
        prune=_in_phase("saving", actions.prune, progress),
        agree=_in_phase("the agreement after the step", actions.agree, progress),
        rebalance_if_due=_in_phase("balancing", actions.rebalance_if_due, progress),
    )


def run_guarded(
    state: TrainState,
    intervals: LoopIntervals,
    actions: LoopActions,
    sink: Sink,
    asked: Mapping[str, Any],
    context: WorkerContext,
    assembly: Assembly,
) -> None:
    """Run the loop; rank 0 tells where it ended at a step with bad numbers.

    Of the worker's argument, `asked["folder"]` is the run's, `asked["skipped"]` are the steps that take the batch after
    their own, and `asked["guard"]` the fields of a NumberGuard.
    """
    skipped, batch_sequences = frozenset(asked["skipped"]), assembly.plan.job.batch_sequences
    actions = with_planted_faults(actions, assembly, Path(asked["folder"]), context.rank)
    step = actions.step
    passing = replace(actions, step=lambda state: step(past_skipped(state, skipped, batch_sequences)))
    _, end = run_loop(state, intervals, passing, sink, NumberGuard(**asked["guard"]))
    if isinstance(end, BadStep) and context.rank == 0:
        context.send("bad step", **asdict(end))


def _in_phase(name: str, act: Callable[_Arguments, _Result], progress: ProgressReport) -> Callable[_Arguments, _Result]:
    def told(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        progress.phase(name)
        progress.collective()
        return act(*arguments, **named)

    return told


class FirstStep:
    """Measures the peak memory of this process's first step and reports it; later steps run without measurement."""

    def __init__(self, assembly: Assembly, world: Sums, context: WorkerContext) -> None:
        self._assembly, self._world, self._context = assembly, world, context
        self._peak_bytes: int | None = None

    def watched(self, state: TrainState) -> tuple[TrainState, Scalars]:
        """Take a step with the assembly; the first one is measured."""
        if self._peak_bytes is not None:
            return self._assembly.step(state)
        with LiveTensorPeak(self._assembly.device, self._assembly.tensors()) as peak:
            result = self._assembly.step(state)
        self._peak_bytes = peak.bytes
        self.report_peaks()
        return result

    def report_peaks(self) -> None:
        """Report the peaks of all ranks, or nothing before the first step; every rank must call it."""
        if self._peak_bytes is None:
            return
        peaks = self._world.gather(torch.tensor([self._peak_bytes, peak_rss_bytes()]))
        if self._context.rank == 0:
            tensor_bytes, rss_bytes = zip(*[peak.tolist() for peak in peaks], strict=True)
            self._context.send("memory", peak_tensor_bytes=tensor_bytes, peak_rss_bytes=rss_bytes)
