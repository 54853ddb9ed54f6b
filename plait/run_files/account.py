"""A run's progress, the use of its time, and the samples of its steps, read from the files in its folder."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from plait.checkpoint.generation import read_generation
from plait.checkpoint.manifest import MANIFEST
from plait.checkpoint.store import published_checkpoints, read_manifest
from plait.errors import PlaitError
from plait.report.bottleneck import RunBottleneck
from plait.report.incidents import (
    Incident,
    SkippedRange,
    generation_of,
    lost_by_cause,
    read_incidents,
    read_starts,
    skipped_ranges,
    skipped_steps,
)
from plait.report.metrics import read_metrics
from plait.report.receipt_file import read_receipt
from plait.run_files.bottleneck import bottleneck_of
from plait.run_files.summary import RunState, run_state
from plait.run_folder import RunFolder

TIME_IN_WORDS = {
    "training": "training",
    "saving": "saving",
    "copying": "copies of the state in memory",
    "starting": "starting",
    "done_again": "steps done again",
    "failures": "failures found and started again",
    "rest": "evaluating and the rest",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """The samples of one step: positions `first` to `last` of the run's order of data, both included.

    `tokens` is the number of their tokens that entered the loss, `generation` the number of the start that took the
    step, or 0 if unknown.
    """

    step: int
    first: int
    last: int
    tokens: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccount:
    """The status of a run; `seconds` splits the time of all its starts by use, and adds up to `wall_s`."""

    run: str
    state: RunState
    step: int
    """The last reported step."""
    step_saved: int | None
    """The step of the newest checkpoint, which is not verified here; None if there is none."""
    saved_at: datetime | None
    """When that checkpoint was made, in UTC."""
    steps: int
    starts: int
    wall_s: float
    useful_share: float
    """Share of the time spent in steps that count."""
    seconds: Mapping[str, float]
    samples_lost: int
    samples_repeated: int
    skipped: Sequence[SkippedRange]
    """Samples skipped on purpose, in the order of steps; they count neither as lost nor as repeated."""
    lost_by_cause: Mapping[str, float]
    """Seconds that failures cost, by cause: until found, until training again, and repeated steps. Part of
    `seconds`."""
    bottleneck: RunBottleneck | None
    """What limits the run now, or limited it at its end; None if unknown."""
    checked_checkpoints: Sequence[int]
    """Steps of the checkpoints whose cursor agrees with the ledger."""
    incidents: Sequence[Incident]

    def to_dict(self) -> dict[str, Any]:
        """The account as plain values for JSON."""
        lost = [one.steps_lost for one in self.incidents]
        incidents = [values | {"steps_lost": n} for values, n in zip(asdict(self)["incidents"], lost, strict=True)]
        plain: dict[str, Any] = {"seconds": dict(self.seconds), "lost_by_cause": dict(self.lost_by_cause)}
        plain["saved_at"] = self.saved_at.isoformat(timespec="seconds") if self.saved_at else None
        return asdict(self) | {"incidents": incidents, "samples_skipped": self.samples_skipped} | plain

    @property
    def samples_skipped(self) -> int:
        """Number of samples skipped on purpose."""
        return sum(one.last - one.first + 1 for one in self.skipped)


def account_of(folder: RunFolder) -> RunAccount:
    """The account of a run that has begun; raises PlaitError if a file of it is damaged."""
    plan = folder.saved_plan()
    reports, _ = read_metrics(folder.metrics)
    incidents, back = read_incidents(folder.incidents)
    ledger = ledger_of(folder)
    totals = folder.totals
    training_s = sum(report.step_s for report in reports if isfinite(report.step_s))
    spent = {
        "training": training_s,
        "saving": totals.save_s,
        "copying": totals.copy_s,
        "starting": totals.start_s,
        "done_again": sum(one.lost_s for one in incidents),
        "failures": sum(one.found_after_s for one in incidents) + sum(one.back_after_s for one in back),
    }
    # Recovery is a start, too: its time is counted separately.
    spent["starting"] = max(0.0, spent["starting"] - sum(one.back_after_s for one in back))
    wall_s = max(totals.wall_s, sum(spent.values()))
    steps = [line.step for line in ledger]
    step_saved, saved_at = _newest_save(folder)
    return RunAccount(
        run=str(folder.path),
        state=run_state(folder, plan, read_receipt(folder.receipt) if folder.receipt.exists() else None),
        step=steps[-1] if steps else 0,
        step_saved=step_saved,
        saved_at=saved_at,
        steps=plan.job.steps,
        starts=max(read_generation(folder.path), 1),
        wall_s=wall_s,
        useful_share=training_s / wall_s if wall_s else 0.0,
        seconds=spent | {"rest": wall_s - sum(spent.values())},
        samples_lost=plan.job.batch_sequences * (max(steps, default=0) - len(set(steps))),
        samples_repeated=plan.job.batch_sequences * (len(steps) - len(set(steps))),
        skipped=tuple(one for one in skipped_ranges(incidents) if one.step <= max(steps, default=0)),
        lost_by_cause=lost_by_cause(incidents, back),
        bottleneck=bottleneck_of(folder),
        checked_checkpoints=tuple(_checked_cursors(folder, plan.job.batch_sequences, skipped_steps(incidents))),
        incidents=incidents,
    )


def _newest_save(folder: RunFolder) -> tuple[int | None, datetime | None]:
    """The step of the newest checkpoint, and when it was made."""
    for path in reversed(published_checkpoints(folder.checkpoints)):
        with suppress(OSError, PlaitError):  # deleted meanwhile, or damaged
            made = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime, UTC)
            return read_manifest(path).step, made
    return None, None


def ledger_of(folder: RunFolder) -> Sequence[LedgerLine]:
    """One line for each step that counts, in the order of metrics.jsonl, without the steps that were repeated later.

    The order of data is a function of the seed, the text and the position (docs/guide-data.md). Each step takes as many
    positions as the plan's batch has sequences, after those that were skipped.
    """
    batch = folder.saved_plan().job.batch_sequences
    reports, _ = read_metrics(folder.metrics)
    skipped = skipped_steps(read_incidents(folder.incidents)[0])
    starts = read_starts(folder.starts)
    before = [0, *(report.tokens for report in reports)]
    lines = []
    for one, counted_before in zip(reports, before, strict=False):
        first = (one.step - 1 + bisect_right(skipped, one.step)) * batch
        generation = generation_of(one.step, starts)
        tokens = one.tokens - counted_before
        lines.append(
            LedgerLine(step=one.step, first=first, last=first + batch - 1, tokens=tokens, generation=generation)
        )
    return lines


def _checked_cursors(folder: RunFolder, batch_sequences: int, skipped: Sequence[int]) -> Sequence[int]:
    """Raises PlaitError if a checkpoint's data cursor is not where its step's samples end."""
    checked = []
    for path in published_checkpoints(folder.checkpoints):
        manifest = read_manifest(path)
        batches = manifest.step + bisect_right(skipped, manifest.step)
        if manifest.cursor != batches * batch_sequences:
            raise PlaitError(
                f"{path} goes on at sample {manifest.cursor}, and {batches} batches of {batch_sequences} end at "
                f"{batches * batch_sequences}; please report it with the run's folder"
            )
        checked.append(manifest.step)
    return checked
