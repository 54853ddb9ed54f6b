"""After a failure of a run's workers, or a step with bad numbers: whether the run goes on by itself, and what is
recorded and printed of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from typing import Any, Literal, NoReturn

from plait.checkpoint.generation import require_newest
from plait.commands.monitoring.restarts import decision_after, kernel_memory_kills, may_pass, pause_s, true_facts
from plait.commands.monitoring.session import Session, Start
from plait.commands.monitoring.starting import NewestState
from plait.errors import GaveUp, PlaitError
from plait.launch.values.failure import FailureFacts, HostNotServed, WorkersFailed
from plait.planner.plan import Plan
from plait.recipe.schema import RecoverSection
from plait.report.atomic import cannot_write
from plait.report.incidents import BackAtWork, Incident, append_incident, read_incidents, skipped_steps
from plait.report.metrics import StepReport, read_metrics
from plait.run_folder import RunFolder
from plait.trainer.divergence import SPIKE_WINDOW_STEPS, BadStep
from plait.units import counted


class Recovery:
    """Follows the failures of one command's starts of a run; `require_present` raises where its folder is gone.
    `may_shrink` says whether the run may go on without a host that it lost."""

    def __init__(
        self,
        asked: RecoverSection,
        folder: RunFolder,
        plan: Plan,
        require_present: Callable[[], None],
        *,
        may_shrink: bool = False,
    ) -> None:
        self._asked, self._folder, self._plan, self._require_present = asked, folder, plan, require_present
        self._may_shrink = may_shrink
        self._without_progress = 0
        self._has_worked = False
        """Whether any start of this command did a step."""
        self._newest_before: int | None = None
        self._failed_at_s: float | None = None
        self._killed_for_memory = kernel_memory_kills()
        self._generation = 0
        self._incidents = list(read_incidents(folder.incidents)[0])

    def begins(self, start: Start) -> None:
        """A start of the workers begins."""
        self._generation = start.generation
        self._killed_for_memory = kernel_memory_kills()

    def follow(self, plan: Plan) -> None:
        """The next start follows this plan."""
        self._plan = plan

    def first_step(self) -> None:
        """The first step of this start was reported: the run is back at work, if it had failed."""
        self._has_worked = True
        if self._failed_at_s is not None:
            back_after_s = time.monotonic() - self._failed_at_s
            self._failed_at_s = None
            self._write(BackAtWork(generation=self._generation, back_after_s=round(back_after_s, 3)))

    def after(self, error: PlaitError, session: Session, start: Start, state: NewestState) -> str:
        """Decide after a failure: return the sentence about the new start that the caller makes now, from `state`, or
        raise the error that ends the run."""
        self._failed_at_s = time.monotonic()
        failure = error if isinstance(error, WorkersFailed) else None
        facts = FailureFacts(cause="raised", what=str(error)) if failure is None else failure.facts
        facts = true_facts(facts, self._killed_for_memory)
        not_served = isinstance(error, HostNotServed) and self._has_worked
        if isinstance(error, HostNotServed) and not_served:
            facts = error.facts
        self._without_progress = 1 if state.step != self._newest_before else self._without_progress + 1
        self._newest_before = state.step
        may_go_on = not_served or (failure is not None and failure.stopped_by == "finished")
        shrinks = facts.cause in ("host lost", "no room") and self._may_shrink
        passes = may_go_on and (shrinks or may_pass(facts, did_steps=session.has_stepped))
        decision = decision_after(self._asked, self._without_progress, "may pass" if passes else "stays")
        no_way_on = state.damage if decision == "started again" else None
        incident = replace(
            self._incident(session, start, state),
            cause=facts.cause,
            what=facts.what,
            rank=facts.rank,
            host=facts.host,
            device=device_of(self._plan, facts.rank),
            place=facts.place,
            stack=facts.stack,
            found_after_s=facts.silent_s,
            decision="ended" if no_way_on else decision,
            sentence=failure.summary if failure else str(error),
        )
        self._write(incident)
        if incident.decision == "started again":
            time.sleep(pause_s(self._without_progress))
            return recovery_text(incident, self._plan)
        self._end(no_way_on or error, incident)

    def cannot_go_on(self, error: PlaitError, session: Session, start: Start, state: NewestState) -> None:
        """Write down that the machines that are left cannot carry the run, which stands at `state`."""
        incident = self._incident(session, start, state)
        ended = replace(incident, cause="too few devices", lost_s=0.0, decision="ended", sentence=str(error))
        self._write(ended)

    def after_bad_step(self, bad: BadStep, session: Session, start: Start, state: NewestState) -> str:
        """Decide after the workers ended at a step with bad numbers: return the sentence about the new start that the
        caller makes now from `state`, a checkpoint: copies are not checked for bad numbers. Raises RunFailed where
        samples are to be skipped and that cannot be written down."""
        self._failed_at_s = time.monotonic()
        if state.damage is not None:
            raise state.damage
        followed = after_bad_step(
            bad,
            self._incidents,
            resumed_from=state.step,
            batch_sequences=self._plan.job.batch_sequences,
            samples="endless" if self._plan.job.budget.epochs is None else "as many as epochs have",
        )
        first, last = followed.skipped or (None, None)
        incident = replace(
            self._incident(session, start, state),
            cause="numbers",
            what=bad.what,
            sentence=followed.sentence,
            bad_step=bad.step,
            skipped_first=first,
            skipped_last=last,
            judged_after=followed.judged_after,
        )
        if followed.treatment == "skip":  # without its line the samples of the steps could not be checked
            self._require_present()
            try:
                append_incident(self._folder.incidents, incident)
            except OSError as error:
                raise cannot_write(self._folder.incidents, error) from error
        else:
            self._write(incident)
        self._incidents.append(incident)
        return recovery_text(incident, self._plan)

    def numbers(self) -> Mapping[str, Any]:
        """The next start's instructions about bad numbers; call it once metrics.jsonl is cut back."""
        never = self._plan.job.steps if self._asked.mode == "never" else 0
        return guard_argument(self._incidents, read_metrics(self._folder.metrics)[0], never)

    def _incident(self, session: Session, start: Start, state: NewestState) -> Incident:
        """The common fields of all incidents of a start that ends now; the rest is left open."""
        times = session.step_times
        if state.step < session.saved_step:  # a checkpoint was damaged: the steps before it are lost as well
            times = {report.step: report.step_s for report in read_metrics(self._folder.metrics)[0]}
        lost = [step_s for step, step_s in times.items() if step > state.step and isfinite(step_s)]
        return Incident(
            generation=start.generation,
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            cause="",
            what="",
            rank=None,
            host=None,
            device=None,
            step=session.last_step,
            place="",
            stack="",
            resumed_from=state.step,
            from_copies=state.where == "memory" or state.was_copied,
            lost_s=round(sum(lost), 6),
            found_after_s=0.0,
            decision="started again",
            sentence="",
        )

    def _end(self, error: PlaitError, incident: Incident) -> NoReturn:
        if incident.decision != "gave up":
            raise error
        raise GaveUp(
            f"gave up after {counted(self._without_progress, 'failure')} without a new checkpoint: the last was that "
            f"{incident.sentence}; {self._folder.incidents} lists all, with their stacks, and the logs beside it what "
            "was printed; fix the cause, then give the same command again"
        ) from error

    def _write(self, line: Incident | BackAtWork) -> None:
        """Keep a line where the run's folder is still there and the disk takes it; the run does not end for it."""
        with suppress(OSError, PlaitError):
            self._require_present()
            require_newest(self._folder.path, self._generation)
            append_incident(self._folder.incidents, line)


def recovery_text(incident: Incident, plan: Plan) -> str:
    """The failure, and from where the run continues by itself."""
    where = f"step-{incident.resumed_from} of {plan.job.steps}" if incident.resumed_from else "the beginning"
    where = f"step {incident.resumed_from} of {plan.job.steps}, kept in memory" if incident.from_copies else where
    lost = f"; {counted(incident.steps_lost, 'step')} done again" if incident.steps_lost else ""
    return f"failure  {incident.sentence}; going on from {where}{lost}"


def device_of(plan: Plan, rank: int | None) -> str | None:
    """The device of a rank in words."""
    if rank is None or not plan.machines.have_accelerators:
        return None if rank is None else "processor"
    before = 0
    for share in plan.machines.hosts:
        if rank < before + share.workers:
            break
        before += share.workers
    return f"GPU {plan.gpu_of(rank - before)}"


# Steps with bad numbers: what follows the next one, and what the workers of each start are given.


Treatment = Literal["again", "skip", "let pass"]
MOST_SKIPPED_STEPS = 10
"""Steps of a run whose samples may be skipped: more of them are no accident."""
MOST_REWINDS = 6
"""Rewinds to one checkpoint, after which the run goes on as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What follows a bad step. `skipped` are the first and last position of the samples that are left out, where they
    are; steps up to `judged_after` are not judged from now on."""

    treatment: Treatment
    sentence: str
    skipped: tuple[int, int] | None = None
    judged_after: int = 0


def after_bad_step(
    bad: BadStep,
    earlier: Sequence[Incident],
    *,
    resumed_from: int,
    batch_sequences: int,
    samples: Literal["endless", "as many as epochs have"],
) -> Followed:
    """The reaction to a bad step of a run with these incidents, whose newest checkpoint is of step `resumed_from`."""
    bad_step = f"step {bad.step} had {bad.what}"
    treatment = _treatment(bad, earlier, resumed_from, samples)
    if treatment == "again":
        return Followed(treatment=treatment, sentence=bad_step)
    if treatment == "skip":
        first = (bad.step - 1 + sum(step < bad.step for step in skipped_steps(earlier))) * batch_sequences
        last = first + batch_sequences - 1
        sentence = f"{bad_step} a second time, so its samples {first} to {last} are skipped"
        return Followed(treatment=treatment, sentence=sentence, skipped=(first, last))
    sentence = f"{bad_step} again, so it is let pass, and so is what follows up to step {bad.step + SPIKE_WINDOW_STEPS}"
    return Followed(treatment=treatment, sentence=sentence, judged_after=bad.step + SPIKE_WINDOW_STEPS)


def _treatment(bad: BadStep, earlier: Sequence[Incident], resumed_from: int, samples: str) -> Treatment:
    rewinds = sum(one.bad_step > 0 and one.resumed_from == resumed_from for one in earlier)
    times = sum(one.bad_step == bad.step for one in earlier)
    if rewinds >= MOST_REWINDS:
        return "let pass"
    if times == 0:
        return "again"
    # A run of this many epochs has no further samples to take instead.
    may_skip = samples == "endless" and len(skipped_steps(earlier)) < MOST_SKIPPED_STEPS
    return "skip" if times == 1 and may_skip else "let pass"


def guard_argument(
    incidents: Sequence[Incident], reports: Sequence[StepReport], judged_after: int
) -> Mapping[str, Any]:
    """What the workers of a start are given: the steps whose samples are skipped, and how numbers are judged, from
    step `judged_after` on. `reports` are the reports of the steps done so far."""
    last = [report for report in reports[-SPIKE_WINDOW_STEPS:] if report.is_finite]
    return {
        "skipped": list(skipped_steps(incidents)),
        "guard": {
            "judged_after": max([judged_after, *(one.judged_after for one in incidents)]),
            "losses": [report.loss for report in last],
            "norms": [report.grad_norm for report in last],
        },
    }
