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
from plait.report.samples_file import SampleReport
from plait.report.sinks import Sink
from plait.trainer.checkpointing.background import SaveEnd
from plait.trainer.checkpointing.pace import CheckpointPace, CopyPace
from plait.trainer.divergence import BadStep, DivergenceWatch, NumberGuard, NumberWatch
from plait.trainer.experts.watch import ExpertUse
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
    sample_every_steps: int = 0
    """The model writes a sample this often, before the first step and at the end; 0: never."""
    checkpoint_every: Every
    copy_every: Every = NEVER
    """How often the state is copied into memory that outlives a worker; in steps."""
    balance_every_steps: int = 0
    """How often the data-parallel ranks' shares of the batch may change; 0: never."""
    watch_every_steps: int = 0
    """The times of all ranks are gathered at least this often, in steps; 0: whenever there is a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The actions of all ranks after a step, the same on each."""

    stop: bool
    save: bool
    copy: bool = False
    copy_cost_s: float = 0.0
    """Seconds for which the last copy held up the slowest rank; 0 where it is known already, or there was none."""


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopActions:
    """The operations that the loop calls; every rank's loop calls the same ones in the same order."""

    step: Callable[[TrainState], tuple[TrainState, Scalars]]
    evaluate: Callable[[TrainState], EvalReport | None]
    sample: Callable[[TrainState], SampleReport | None] = lambda _: None
    """The model's samples; None on all ranks but 0."""
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
    detail: Callable[[str], None] = _ignore
    """Takes a sentence that only somebody who asked for details wants to read."""
    mfu: Callable[[float], float | None]
    """Maps tokens per second to model FLOP/s utilization (MFU); None where the peak FLOP/s are unknown."""


LoopPhase = Literal[
    "the agreement after the step", "balancing", "evaluation", "a sample", "saving", "the copy of the state"
]
"""The loop's actions between steps; ranks may wait for each other in each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Hooks that the loop calls on every rank, for all observers in the order of their list. They return nothing, and
    only the balancer's may change what the next step does."""

    before_step: Callable[[TrainState], None] = _ignore
    """Takes the state before the step."""
    after_step: Callable[[TrainState], None] = _ignore
    """Takes the state after the step, which the device may still be computing."""
    at_phase: Callable[[LoopPhase], None] = _ignore
    at_report: Callable[[StepReport, ExpertUse], None] = _ignore
    """Called for each step once its numbers were fetched, in the order of steps."""
    at_save: Callable[[SaveEnd], None] = _ignore
    """Called when a save has ended, well or not."""


@dataclass(slots=True)
class _Pending:
    """A step whose scalars are still on the device."""

    state: TrainState
    scalars: Scalars
    lr: float
    data_wait_s: float


def run_loop(
    state: TrainState,
    intervals: LoopIntervals,
    actions: LoopActions,
    sink: Sink,
    guard: NumberGuard | None = None,
    observers: Sequence[Observer] = (),
) -> tuple[TrainState, Literal["done", "stopped"] | BadStep]:
    """Train from `state` to the last step, or until a stop is requested; saves a checkpoint at the end in both cases.

    With a `guard` it also ends, without saving, at the first step that is bad by it, which every rank finds when that
    step's numbers are fetched. Reports reach the sink before the checkpoint of their step is written, so that a resume
    finds every line it needs.
    Weights without a finite loss are not saved; RunFailed is raised, on every rank at the same step, where the run has
    diverged.
    """
    numbers = NumberWatch(guard or NumberGuard(judged_after=intervals.steps))
    saves = _Saves(state, intervals, actions, sink, observers)
    reporting = [
        Observer(at_report=lambda report, _: sink.step(report)),
        Observer(at_report=saves.at_report),
        *observers,
        Observer(at_report=lambda report, _: numbers.add(report)),
    ]
    fetch_every = intervals.report_every_steps, intervals.balance_every_steps, intervals.watch_every_steps
    pending: list[_Pending] = []
    if state.step == 0 and intervals.sample_every_steps:
        _sample(state, actions, sink, observers)
    began = time.perf_counter()
    stop = False
    while state.step < intervals.steps and not stop:
        for one in observers:
            one.before_step(state)
        lr = actions.learning_rate(state.step)
        state, scalars = actions.step(state)
        for one in observers:
            one.after_step(state)
        pending.append(_Pending(state, scalars, lr, actions.data_wait_s()))
        last = state.step == intervals.steps
        agreed = saves.agree(state.step)
        stop = agreed.stop
        evaluate = last or _divides(intervals.evaluate_every_steps, state.step)
        sample = intervals.sample_every_steps > 0 and (last or state.step % intervals.sample_every_steps == 0)
        fetch = any(_divides(every, state.step) for every in fetch_every)
        if not (fetch or last or stop or agreed.save or evaluate or sample or agreed.copy):
            continue
        state = _report(pending, state, began, actions.mfu, reporting)
        if numbers.first_bad is not None:
            saves.finish()
            return state, numbers.first_bad
        saves.divergence.end_if_diverged(run_ends=stop or last)
        _enter("balancing", observers)
        for sentence in actions.rebalance_if_due(state):
            sink.note(sentence)
        if evaluate:
            _enter("evaluation", observers)
            if report := actions.evaluate(state):
                sink.evaluation(report)
                saves.divergence.evaluated(report)
        if sample:
            _sample(state, actions, sink, observers)
        saves.save_if_due(state, agreed, run_ends=stop or last)
        began = time.perf_counter()
    return state, "stopped" if state.step < intervals.steps else "done"


def _sample(state: TrainState, actions: LoopActions, sink: Sink, observers: Sequence[Observer]) -> None:
    _enter("a sample", observers)
    if report := actions.sample(state):
        sink.sample(report)


def _enter(phase: LoopPhase, observers: Sequence[Observer]) -> None:
    for one in observers:
        one.at_phase(phase)


class _Saves:
    """Decides when the state is saved and copied and when old checkpoints are deleted, from the clock, the costs of
    earlier saves, and the losses of the steps."""

    def __init__(
        self,
        state: TrainState,
        intervals: LoopIntervals,
        actions: LoopActions,
        sink: Sink,
        observers: Sequence[Observer],
    ) -> None:
        self._actions, self._sink, self._observers = actions, sink, observers
        self._pace = CheckpointPace(intervals.checkpoint_every, step=state.step)
        self._copies = CopyPace(intervals.copy_every, step=state.step)
        self.divergence = DivergenceWatch(state.step)

    def at_report(self, report: StepReport, _: ExpertUse) -> None:
        self.divergence.add(report)
        self._copies.stepped(report.step_s)

    def agree(self, step: int) -> Agreement:
        """Agree with all ranks on what follows this step, and take note of a save that has ended."""
        due = self._pace.is_due(step), self._copies.is_due(step)
        _enter("the agreement after the step", self._observers)
        agreed = self._actions.agree(self._actions.stop_requested(), *due)
        cost_s = agreed.copy_cost_s
        if cost_s and (sentence := self._copies.copied(cost_s, self._pace.share)):
            self._actions.detail(sentence)
        self._ended(self._actions.save_ended())
        return agreed

    def save_if_due(self, state: TrainState, agreed: Agreement, *, run_ends: bool) -> None:
        """Save or copy a state whose numbers were reported, where that was agreed on; a run saves its end."""
        self._prune_if_proven()  # before the next one is written, so that the disk need not hold both
        if not self.divergence.loss_is_finite:
            return
        if agreed.save or run_ends:
            self.finish()
            self._pace.begun(state.step)
            self._copies.begun(state.step)
            _enter("saving", self._observers)
            if not run_ends:
                self._actions.begin_save(state)
                return
            self._ended(self._actions.save(state))
            self._prune_if_proven()
        elif agreed.copy:
            self._copies.begun(state.step)
            _enter("the copy of the state", self._observers)
            self._note(self._actions.copy(state))

    def finish(self) -> None:
        """Wait until the save that goes on has ended."""
        _enter("saving", self._observers)
        self._ended(self._actions.finish_save())

    def _ended(self, end: SaveEnd | None) -> None:
        if end is None:
            return
        for one in self._observers:
            one.at_save(end)
        if end.failure:
            self._note(self._pace.failed(end.failure))
            return
        self.divergence.saved(end.step)
        self._note(self._pace.cost_known(end.step, end.cost_s))

    def _prune_if_proven(self) -> None:
        if self.divergence.may_prune:
            _enter("saving", self._observers)
            self._actions.prune()
            self.divergence.pruned()

    def _note(self, sentence: str | None) -> None:
        if sentence:
            self._sink.note(sentence)


def _divides(every_steps: int, step: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def _report(
    pending: list[_Pending],
    state: TrainState,
    began: float,
    mfu: Callable[[float], float | None],
    observers: Sequence[Observer],
) -> TrainState:
    """Fetch the scalars of all pending steps in one copy and report each step; returns the state with its tokens
    counted."""
    rows = torch.stack([_row(one.scalars) for one in pending]).tolist()
    step_s = (time.perf_counter() - began) / len(pending)  # after the fetch, which waits for the device
    tokens = state.tokens
    for one, row in zip(pending, rows, strict=True):
        loss_sum, counted, norm, load, idle, dropped, choices, margins, right, answers, scale, skipped, *auxiliary = row
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
            mfu=mfu(learnt / step_s),
            data_wait_s=one.data_wait_s,
            expert_load_max=None if isnan(load) else load,
            expert_dropped=None if isnan(dropped) else dropped / max(choices, 1),
            auxiliary_losses=_auxiliary_losses(one.scalars.objective_names, auxiliary),
            reward_margin=None if isnan(answers) else margins / max(counted, 1),
            pair_accuracy=None if isnan(answers) else right / max(counted, 1),
            loss_scale=None if isnan(scale) else scale,
            updates_skipped=None if isnan(skipped) else int(skipped),
        )
        experts = ExpertUse(
            experts=one.scalars.expert_counts.numel(),
            idle=int(idle),
            choices=int(choices),
            dropped=0 if isnan(dropped) else int(dropped),
        )
        for observer in observers:
            observer.at_report(report, experts)
    pending.clear()
    return replace(state, tokens=tokens)


def _row(scalars: Scalars) -> Tensor:
    """What is fetched of a step: [sum of losses, counted tokens, norm, the busiest expert's load, idle experts, choices
    that were dropped, all choices of experts], what is summed of pairs, float16's scale and skipped updates, and [sum
    of losses, counted tokens] of each auxiliary objective."""
    of_experts = (scalars.expert_load_max, scalars.idle_experts, scalars.dropped, scalars.expert_counts.sum())
    others = torch.stack([value.to(scalars.totals) for value in (scalars.norm, *of_experts)])
    more = scalars.pairs.to(others), scalars.scale.to(others), scalars.auxiliary.to(others).flatten()
    return torch.cat([scalars.totals, others, *more]).double()


def _auxiliary_losses(names: Sequence[str], sums: Sequence[float]) -> dict[str, float | None] | None:
    """Each objective's mean loss, from its sum and its tokens one after the other; None where there are none, and as a
    value where it is not finite."""
    means = [total / max(counted, 1) for total, counted in zip(sums[::2], sums[1::2], strict=True)]
    finite = [mean if isfinite(mean) else None for mean in means]
    return dict(zip(names, finite, strict=True)) if names else None
