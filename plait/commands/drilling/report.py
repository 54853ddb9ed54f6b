"""The outcome of a drill: each fault with the incident that followed it, as JSON and as printed lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Literal

from plait.commands.drilling.faults import WITHOUT_RANK, Fault
from plait.report.incidents import BackAtWork, Incident, read_incidents
from plait.report.metrics import read_metrics
from plait.run_files.account import account_of, ledger_of
from plait.run_folder import RunFolder
from plait.units import counted, format_duration

FinalEqual = Literal["bits", "samples", "no"]
ComparedWith = Literal["a run left alone", "its own ledger"]
_LARGEST_LOSS_DIFFERENCE = 1e-5
"""Relative, in float32, where other devices sum in another order."""
_ENDS = {"bits": "the same bits", "samples": "the same samples, other bits", "no": "another end"}
_CLOCK_S = 0.002
"""Incidents are dated to the millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault as it was carried out, `at` seconds of the clock of the day, after this step and in that phase.

    `what` was done, if the fault left that open. `found_at` and `back_at` are known of faults after which the workers
    do not start again. `failure` says why it could not be carried out after all.
    """

    at: float
    step: int
    phase: str = ""
    what: str = ""
    found_at: float | None = None
    back_at: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOutcome:
    """The outcome of one fault; times are seconds since the fault, None if that did not happen. A rank that is merely
    slow is not found."""

    kind: str
    rank: int
    step: int
    phase: str = ""
    what: str = ""
    found_after_s: float | None = None
    back_after_s: float | None = None
    steps_lost: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillReport:
    """The outcome of a drill."""

    seed: int
    faults: Sequence[FaultOutcome]
    samples_lost: int
    samples_repeated: int
    samples_skipped: int
    """Left out on purpose, after bad numbers."""
    final_equal: FinalEqual
    useful_share: float
    compared_with: ComparedWith = "a run left alone"
    loss_difference: float | None = None
    """The largest relative difference of a step's loss from that of the run that was left alone; None without such a
    run, or if not all steps of both have a finite loss."""
    ended_by: str = ""
    """The sentence with which the run ended before its time."""

    @property
    def ok(self) -> bool:
        """Whether every fault was survived, and nothing was lost by it. Where other devices took over, the same samples
        and losses are enough."""
        back = all(fault.back_after_s is not None for fault in self.faults)
        nothing_lost = self.samples_lost == self.samples_repeated == 0
        return back and nothing_lost and not self.ended_by and self._ends_as_it_should

    @property
    def _ends_as_it_should(self) -> bool:
        if self.final_equal != "samples":
            return self.final_equal == "bits"
        if self.compared_with == "its own ledger":
            return True
        lost_hosts = any(fault.kind == "lose-host" for fault in self.faults)
        near = self.loss_difference is not None and self.loss_difference <= _LARGEST_LOSS_DIFFERENCE
        return lost_hosts and near

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps({"ok": self.ok, **asdict(self)})

    def lines(self) -> list[str]:
        """The report in a few lines for people."""
        lines = [_fault_line(fault) for fault in self.faults]
        skipped = f", {self.samples_skipped} skipped on purpose" if self.samples_skipped else ""
        lines.append(f"samples  {self.samples_lost} lost, {self.samples_repeated} counted twice{skipped}")
        useful = f"{self.useful_share:.1%} of the time was useful"
        if self.ended_by:
            lines.append(f"end      too early: {self.ended_by}")
        elif self.compared_with == "its own ledger":
            lines.append(f"end      no run was left alone to compare with; {useful}")
        else:
            known = self.final_equal == "samples" and self.loss_difference is not None
            near = f" (losses differ by {self.loss_difference:.1e} at most)" if known else ""
            lines.append(f"end      {_ENDS[self.final_equal]} as the run that was left alone{near}; {useful}")
        return lines


def report_of(
    drilled: RunFolder,
    faults: Sequence[Fault],
    injected: Mapping[int, InjectedFault],
    *,
    seed: int,
    alone: RunFolder | None,
    ended_by: str = "",
) -> DrillReport:
    """The report of a run after these faults, compared with the one that was left alone, if there is one."""
    incidents, back = read_incidents(drilled.incidents)
    account = account_of(drilled)
    nothing_lost = not account.samples_lost and not account.samples_repeated
    return DrillReport(
        seed=seed,
        faults=[outcome_of(fault, injected.get(number), incidents, back) for number, fault in enumerate(faults)],
        samples_lost=account.samples_lost,
        samples_repeated=account.samples_repeated,
        samples_skipped=account.samples_skipped,
        final_equal=_compared(alone, drilled) if alone else "samples" if nothing_lost else "no",
        useful_share=account.useful_share,
        compared_with="a run left alone" if alone else "its own ledger",
        loss_difference=_loss_difference(alone, drilled) if alone else None,
        ended_by=ended_by,
    )


def outcome_of(
    fault: Fault, injected: InjectedFault | None, incidents: Sequence[Incident], back: Sequence[BackAtWork]
) -> FaultOutcome:
    """What came of a fault: the first incident since then, and the first step after it.

    Where workers died once more on their way back, the step came after a later start.
    """
    outcome = FaultOutcome(kind=fault.kind, rank=fault.rank, step=fault.step)
    if injected is None:
        return outcome
    at = injected.at
    outcome = replace(outcome, step=injected.step, phase=injected.phase, what=injected.failure or injected.what)
    if injected.failure:
        return outcome
    followed = next((one for one in incidents if _seconds(one) >= at - _CLOCK_S), None) if fault.restarts else None
    found_s = back_s = None
    if followed is not None:
        found_s = max(0.0, _seconds(followed) - at)
        first = next((one for one in back if one.generation > followed.generation), None)
        if first is not None:
            last = max((one for one in incidents if one.generation < first.generation), key=lambda one: one.generation)
            back_s = max(0.0, _seconds(last) - at) + first.back_after_s
    if injected.found_at is not None:
        found_s = injected.found_at - at
    if injected.back_at is not None:
        back_s = injected.back_at - at
    return replace(
        outcome,
        found_after_s=None if found_s is None else round(found_s, 3),
        back_after_s=None if back_s is None else round(back_s, 3),
        steps_lost=followed.steps_lost if followed else None if injected.back_at is None else 0,
    )


def _fault_line(fault: FaultOutcome) -> str:
    who = "" if fault.kind in WITHOUT_RANK else f"{fault.rank}"
    where = f" in {fault.phase}" if fault.phase else ""
    what = f"{fault.kind} {who}@{fault.step}{where}"
    done = f" ({fault.what})" if fault.what else ""
    if fault.back_after_s is None:
        return f"fault    {what}: not carried out, or not survived{done}"
    back = format_duration(fault.back_after_s)
    if fault.found_after_s is None:
        return f"fault    {what}: waited for, the next step after {back}, nothing lost"
    found = format_duration(fault.found_after_s)
    if fault.kind == "fill-disk":
        return f"fault    {what}: a save failed after {found} while training went on, the next went well after {back}"
    lost = counted(fault.steps_lost or 0, "step")
    return f"fault    {what}{done}: found after {found}, back after {back}, {lost} lost"


def _seconds(incident: Incident) -> float:
    return datetime.fromisoformat(incident.at).timestamp()


def _compared(alone: RunFolder, drilled: RunFolder) -> FinalEqual:
    last = f"step-{alone.saved_plan().job.steps}"
    one, other = (_manifest(folder.checkpoints / last) for folder in (alone, drilled))
    if one is not None and one == other:
        return "bits"
    samples = [[(line.step, line.first, line.last, line.tokens) for line in ledger_of(one)] for one in (alone, drilled)]
    return "samples" if samples[0] == samples[1] else "no"


def _loss_difference(alone: RunFolder, drilled: RunFolder) -> float | None:
    losses = [{report.step: report.loss for report in read_metrics(one.metrics)[0]} for one in (alone, drilled)]
    if losses[0].keys() != losses[1].keys() or not all(isfinite(loss) for one in losses for loss in one.values()):
        return None
    return max((abs(loss - losses[1][step]) / max(abs(loss), 1e-12) for step, loss in losses[0].items()), default=0.0)


def _manifest(checkpoint: Path) -> bytes | None:
    path = checkpoint / "manifest.json"
    return path.read_bytes() if path.exists() else None
