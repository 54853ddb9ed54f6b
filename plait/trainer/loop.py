"""The training loop: step, report, evaluate and save when due, and stop when requested.

It knows neither recipe nor model nor mesh: it gets values and callables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan
from typing import Literal

import torch
from torch import Tensor

from plait.report.metrics import EvalReport, StepReport
from plait.report.sinks import Sink
from plait.trainer.checkpointing.background import SaveEnd
from plait.trainer.checkpointing.copy_pace import CopyPace
from plait.trainer.checkpointing.pace import CheckpointPace
from plait.trainer.divergence import BadStep, DivergenceWatch, NumberGuard, NumberWatch
from plait.trainer.experts.watch import DropWatch, IdleWatch
from plait.trainer.state import TrainState
from plait.trainer.step import Scalars
from plait.units import NEVER, Every


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopIntervals:
    """Number of steps in the run, and the intervals of its reports, evaluations, checkpoints and rebalancing."""

    steps: int
    report_every_steps: int
    evaluate_every_steps: int
    """0 evaluates only at the end."""
    checkpoint_every: Every
    copy_every: Every = NEVER
    """How often the state is copied into memory that outlives a worker; in steps."""
    balance_every_steps: int = 0
    """How often the data-parallel ranks' shares of the batch may change; 0: never."""
    watch_every_steps: int = 0
    """The times of all ranks are gathered at least this often, in steps; 0: whenever there is a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What all ranks do after a step, the same on each."""

    stop: bool
    save: bool
    copy: bool = False
    copy_cost_s: float = 0.0
    """Seconds for which the last copy held up the slowest rank; 0 where it is known already, or there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopActions:
    """The operations that the loop calls; every rank's loop calls the same ones in the same order."""

    step: Callable[[TrainState], tuple[TrainState, Scalars]]
    evaluate: Callable[[TrainState], EvalReport | None]
    save: Callable[[TrainState], SaveEnd | None]
    """Saves the state that the run ends with: returns when it is on the disk."""
    begin_save: Callable[[TrainState], None]
    """Saves a state while training goes on; no other save may go on."""
    save_ended: Callable[[], SaveEnd | None]
    """How the save that went on has ended, by the last `agree`; None while it goes on, or where there is none."""
    finish_save: Callable[[], SaveEnd | None]
    """The same, after waiting for its end."""
    copy: Callable[[TrainState], str]
    """Copies a state into memory that outlives the workers; returns a warning for the log, or "". So does
    `begin_save`."""
    prune: Callable[[], None]
    """Deletes old checkpoints, once the newest one is known to give a finite loss."""
    agree: Callable[[bool, bool, bool], Agreement]
    """Maps (stop requested here?, save due here?, copy due here?) to what is done, with the same result on every
    rank."""
    rebalance_if_due: Callable[[TrainState], Sequence[str]]
    """Called after each fetch of the scalars; may change the ranks' shares of the work. Returns lines for the log."""
    stop_requested: Callable[[], bool]
    learning_rate: Callable[[int], float]
    data_wait_s: Callable[[], float]
    mfu: Callable[[float], float | None]
    """Maps tokens per second to model FLOP/s utilization (MFU); None where the peak FLOP/s are unknown."""


@dataclass(slots=True)
class _Pending:
    """A step whose scalars are still on the device."""

    state: TrainState
    scalars: Scalars
    lr: float
    data_wait_s: float


@dataclass(slots=True)
class _Watches:
    """What follows the numbers of the steps."""

    divergence: DivergenceWatch
    numbers: NumberWatch
    idle: IdleWatch
    copies: CopyPace
    drops: DropWatch


def run_loop(
    state: TrainState, intervals: LoopIntervals, actions: LoopActions, sink: Sink, guard: NumberGuard | None = None
) -> tuple[TrainState, Literal["done", "stopped"] | BadStep]:
    """Train from `state` to the last step, or until a stop is requested; saves a checkpoint at the end in both cases.

    With a `guard` it also ends, without saving, at the first step that is bad by it, which every rank finds when that
    step's numbers are fetched. Reports reach the sink before the checkpoint of their step is written, so that a resume
    finds every line it needs.
    Weights without a finite loss are not saved; RunFailed is raised, on every rank at the same step, where the run has
    diverged.
    """
    pace = CheckpointPace(intervals.checkpoint_every, step=state.step)
    pending: list[_Pending] = []
    began = time.perf_counter()
    stop, divergence = False, DivergenceWatch(state.step)
    numbers = NumberWatch(guard or NumberGuard(judged_after=intervals.steps))
    copies = CopyPace(intervals.copy_every, step=state.step)
    watches = _Watches(divergence, numbers, IdleWatch(), copies, DropWatch())
    while state.step < intervals.steps and not stop:
        lr = actions.learning_rate(state.step)
        state, scalars = actions.step(state)
        pending.append(_Pending(state, scalars, lr, actions.data_wait_s()))
        last = state.step == intervals.steps
        agreed = actions.agree(actions.stop_requested(), pace.is_due(state.step), copies.is_due(state.step))
        stop, save = agreed.stop, agreed.save
        if agreed.copy_cost_s and (sentence := copies.copied(agreed.copy_cost_s, pace.share)):
            sink.note(sentence)
        _note_save(actions.save_ended(), pace, divergence, sink)
        evaluate = last or _divides(intervals.evaluate_every_steps, state.step)
        paces = intervals.report_every_steps, intervals.balance_every_steps, intervals.watch_every_steps
        fetch = any(_divides(every, state.step) for every in paces)
        if not (fetch or last or stop or save or evaluate or agreed.copy):
            continue
        state, bad = _flush(pending, state, began, actions, sink, watches)
        if bad is not None:
            _note_save(actions.finish_save(), pace, divergence, sink)
            return state, bad
        divergence.end_if_diverged(run_ends=stop or last)
        for sentence in actions.rebalance_if_due(state):
            sink.note(sentence)
        if evaluate and (report := actions.evaluate(state)):
            sink.evaluation(report)
            divergence.evaluated(report)
        _prune_if_proven(actions, divergence)  # before the next one is written, so that the disk need not hold both
        if (save or stop or last) and divergence.loss_is_finite:
            _note_save(actions.finish_save(), pace, divergence, sink)
            pace.begun(state.step)
            copies.begun(state.step)
            if stop or last:
                _note_save(actions.save(state), pace, divergence, sink)
                _prune_if_proven(actions, divergence)
            else:
                actions.begin_save(state)
        elif agreed.copy and divergence.loss_is_finite:
            copies.begun(state.step)
            if sentence := actions.copy(state):
                sink.note(sentence)
        began = time.perf_counter()
    return state, "stopped" if state.step < intervals.steps else "done"


def _note_save(end: SaveEnd | None, pace: CheckpointPace, divergence: DivergenceWatch, sink: Sink) -> None:
    if end is None:
        return
    if end.failure:
        if sentence := pace.failed(end.failure):
            sink.note(sentence)
        return
    divergence.saved(end.step)
    if sentence := pace.cost_known(end.step, end.cost_s):
        sink.note(sentence)


def _prune_if_proven(actions: LoopActions, divergence: DivergenceWatch) -> None:
    if divergence.may_prune:
        actions.prune()
        divergence.pruned()


def _divides(every_steps: int, step: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def _flush(
    pending: list[_Pending],
    state: TrainState,
    began: float,
    actions: LoopActions,
    sink: Sink,
    watches: _Watches,
) -> tuple[TrainState, BadStep | None]:
    """Fetch the scalars of all pending steps in one copy and report each step; returns the state with its tokens
    counted, and the first step that is bad."""
    rows = torch.stack([_row(one.scalars) for one in pending]).tolist()
    step_s = (time.perf_counter() - began) / len(pending)  # after the fetch, which waits for the device
    tokens, bad = state.tokens, None
    for one, (loss_sum, counted, norm, load, idle_count, dropped, choices, margins, right, answers, *auxiliary) in zip(
        pending, rows, strict=True
    ):
        learnt = counted if isnan(answers) else answers
        tokens += int(learnt)
        report = StepReport(
            step=one.state.step,
            tokens=tokens,
            loss=loss_sum / max(counted, 1),
            grad_norm=norm,
            lr=one.lr,
            step_s=step_s,
            tokens_per_s=learnt / step_s,
            mfu=actions.mfu(learnt / step_s),
            data_wait_s=one.data_wait_s,
            expert_load_max=None if isnan(load) else load,
            expert_dropped=None if isnan(dropped) else dropped / max(choices, 1),
            auxiliary_losses=_auxiliary_losses(one.scalars.objective_names, auxiliary),
            reward_margin=None if isnan(answers) else margins / max(counted, 1),
            pair_accuracy=None if isnan(answers) else right / max(counted, 1),
        )
        sink.step(report)
        watches.divergence.add(report)
        watches.copies.stepped(step_s)
        if sentence := watches.idle.add(one.state.step, int(idle_count), one.scalars.expert_counts.numel()):
            sink.note(sentence)
        if not isnan(dropped) and (sentence := watches.drops.add(one.state.step, int(dropped), int(choices))):
            sink.note(sentence)
        found = watches.numbers.judge(report)
        bad = bad or found
    pending.clear()
    return replace(state, tokens=tokens), bad


def _row(scalars: Scalars) -> Tensor:
    """What is fetched of a step: [sum of losses, counted tokens, norm, the busiest expert's load, idle experts, choices
    that were dropped, all choices of experts], what is summed of pairs, and [sum of losses, counted tokens] of each
    auxiliary objective."""
    of_experts = (scalars.expert_load_max, scalars.idle_experts, scalars.dropped, scalars.expert_counts.sum())
    others = torch.stack([value.to(scalars.totals) for value in (scalars.norm, *of_experts)])
    more = scalars.pairs.to(others), scalars.auxiliary.to(others).flatten()
    return torch.cat([scalars.totals, others, *more]).double()


def _auxiliary_losses(names: Sequence[str], sums: Sequence[float]) -> dict[str, float | None] | None:
    """Each objective's mean loss, from its sum and its tokens one after the other; None where there are none, and as a
    value where it is not finite."""
    means = [total / max(counted, 1) for total, counted in zip(sums[::2], sums[1::2], strict=True)]
    finite = [mean if isfinite(mean) else None for mean in means]
    return dict(zip(names, finite, strict=True)) if names else None
