"""What came of a drill: a value, its JSON, and the lines that people read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from plait.commands.drilling.faults import Fault
from plait.commands.drilling.outcome import Carried, told_fault
from plait.commands.monitoring.account import account_of, ledger_of
from plait.commands.planning.run_folder import RunFolder
from plait.report.incidents import read_incidents
from plait.report.metrics import read_metrics
from plait.units import counted, format_duration

FinalEqual = Literal["bits", "samples", "no"]
ComparedWith = Literal["a run left alone", "its own ledger"]
_LARGEST_LOSS_DIFFERENCE = 1e-5
"""Relative, in float32, where other devices sum in another order."""
_ENDS = {"bits": "the same bits", "samples": "the same samples, other bits", "no": "another end"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillReport:
    """What came of a drill; times are seconds from the fault on."""

    seed: int
    faults: Sequence[Mapping[str, Any]]
    """For each: kind, rank, step, phase, what, found_after_s, back_after_s, steps_lost; null where it did not come to
    that. Nobody looks for one that is only slow."""
    samples_lost: int
    samples_repeated: int
    samples_skipped: int
    """Left out on purpose, after bad numbers."""
    final_equal: FinalEqual
    useful_share: float
    compared_with: ComparedWith = "a run left alone"
    loss_difference: float | None = None
    """The largest relative difference of a step's loss from the run's that was left alone; None where there is none, or
    not all steps of both have a finite loss."""
    ended_by: str = ""
    """The sentence with which the run ended before its time."""

    @property
    def ok(self) -> bool:
        """Whether every fault was survived, and nothing was lost by it. Where other devices took over, the same samples
        and losses are enough."""
        back = all(fault["back_after_s"] is not None for fault in self.faults)
        nothing_lost = self.samples_lost == self.samples_repeated == 0
        return back and nothing_lost and not self.ended_by and self._ends_as_it_should

    @property
    def _ends_as_it_should(self) -> bool:
        if self.final_equal != "samples":
            return self.final_equal == "bits"
        if self.compared_with == "its own ledger":
            return True
        lost_hosts = any(fault["kind"] == "lose-host" for fault in self.faults)
        near = self.loss_difference is not None and self.loss_difference <= _LARGEST_LOSS_DIFFERENCE
        return lost_hosts and near

    def to_json(self) -> str:
        """One JSON object."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"ok": self.ok, **values})


def report_of(
    drilled: RunFolder,
    planned: Sequence[Fault],
    carried: Mapping[int, Carried],
    *,
    seed: int,
    alone: RunFolder | None,
    ended_by: str = "",
) -> DrillReport:
    """The report of a run after these faults, compared with one that was left alone where there is one."""
    incidents, back = read_incidents(drilled.incidents)
    account = account_of(drilled)
    nothing_lost = not account.samples_lost and not account.samples_repeated
    return DrillReport(
        seed=seed,
        faults=[told_fault(fault, carried.get(number), incidents, back) for number, fault in enumerate(planned)],
        samples_lost=account.samples_lost,
        samples_repeated=account.samples_repeated,
        samples_skipped=account.samples_skipped,
        final_equal=_compared(alone, drilled) if alone else "samples" if nothing_lost else "no",
        useful_share=account.useful_share,
        compared_with="a run left alone" if alone else "its own ledger",
        loss_difference=_loss_difference(alone, drilled) if alone else None,
        ended_by=ended_by,
    )


def drill_lines(report: DrillReport) -> list[str]:
    """A report in a few lines for people."""
    lines = [_fault_line(fault) for fault in report.faults]
    skipped = f", {report.samples_skipped} skipped on purpose" if report.samples_skipped else ""
    lines.append(f"samples  {report.samples_lost} lost, {report.samples_repeated} counted twice{skipped}")
    useful = f"{report.useful_share:.1%} of the time was useful"
    if report.ended_by:
        lines.append(f"end      too early: {report.ended_by}")
    elif report.compared_with == "its own ledger":
        lines.append(f"end      no run was left alone to compare with; {useful}")
    else:
        known = report.final_equal == "samples" and report.loss_difference is not None
        near = f" (losses differ by {report.loss_difference:.1e} at most)" if known else ""
        lines.append(f"end      {_ENDS[report.final_equal]} as the run that was left alone{near}; {useful}")
    return lines


def _fault_line(fault: Mapping[str, Any]) -> str:
    who = "" if fault["kind"] in ("fill-disk", "corrupt") else f"{fault['rank']}"
    where = f" in {fault['phase']}" if fault["phase"] else ""
    what = f"{fault['kind']} {who}@{fault['step']}{where}"
    done = f" ({fault['what']})" if fault["what"] else ""
    if fault["back_after_s"] is None:
        return f"fault    {what}: not carried out, or not survived{done}"
    back = format_duration(fault["back_after_s"])
    if fault["found_after_s"] is None:
        return f"fault    {what}: waited for, the next step after {back}, nothing lost"
    found = format_duration(fault["found_after_s"])
    if fault["kind"] == "fill-disk":
        return f"fault    {what}: a save failed after {found} while training went on, the next went well after {back}"
    lost = counted(fault["steps_lost"], "step")
    return f"fault    {what}{done}: found after {found}, back after {back}, {lost} lost"


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
