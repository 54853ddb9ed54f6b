"""incidents.jsonl: what went wrong in a run, one line each, and one for each time that it was back at work; and
starts.jsonl, a line for each start of its workers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from plait.checked_json import parse_json, typed_value
from plait.errors import PlaitError
from plait.regular_file import read_regular_file
from plait.report.atomic import append_line, cannot_write

Decision = Literal["started again", "ended", "gave up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One failure of one start (`generation`) of a run.

    `step` is the last that was reported, `resumed_from` that of the checkpoint, or of the copies in memory, that the
    run stands at now: the steps between were lost, and `lost_s` were spent on them. `rank`, `host` and `device` are
    None where they are unknown or there are none.
    """

    generation: int
    at: str
    """UTC, ISO 8601."""
    cause: str
    what: str
    rank: int | None
    host: str | None
    device: str | None
    step: int
    place: str
    stack: str
    resumed_from: int
    lost_s: float
    found_after_s: float
    """How long a rank that hung had been silent; 0 for what is found at once."""
    decision: Decision
    sentence: str
    bad_step: int = 0
    """The step whose loss or gradient was bad, where that is the cause ("numbers")."""
    skipped_first: int | None = None
    skipped_last: int | None = None
    """Positions of the samples that the run leaves out from now on, both included; None where it leaves out none."""
    from_copies: bool = False
    """Whether the run went on from copies in memory, and not from a checkpoint."""
    judged_after: int = 0
    """Up to this step the run continues regardless of its numbers."""

    @property
    def steps_lost(self) -> int:
        """Steps that were done and have to be done again."""
        return max(0, self.step - self.resumed_from)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackAtWork:
    """The start `generation` reported its first step, so long after the failure before it was known."""

    generation: int
    back_after_s: float


def append_incident(path: Path, line: Incident | BackAtWork) -> None:
    """Add one line, and wait until the disk has it; raises OSError."""
    values = asdict(line) | ({"steps_lost": line.steps_lost} if isinstance(line, Incident) else {})
    append_line(path, json.dumps(values, allow_nan=False))


def read_incidents(path: Path) -> tuple[Sequence[Incident], Sequence[BackAtWork]]:
    """All lines; none where there is no file. A last line without its newline, of one that was killed, is left out.

    Raises PlaitError, with the line's number, where one is neither kind.
    """
    incidents: list[Incident] = []
    back: list[BackAtWork] = []
    try:
        lines = read_regular_file(path).split(b"\n")[:-1] if path.exists() else []
    except ValueError as error:
        raise PlaitError(f"{path} cannot be read ({error}); move it away") from None
    for number, line in enumerate(lines, start=1):
        try:
            values = parse_json(line)
            if isinstance(values, dict) and "back_after_s" in values:
                back.append(typed_value(BackAtWork, values))
            else:
                kept = {key: value for key, value in values.items() if key != "steps_lost"}
                incidents.append(typed_value(Incident, kept))
        except (ValueError, AttributeError) as error:
            raise PlaitError(f"{path}:{number} is no incident of a run ({error}); take the line out") from None
    return incidents, back


def skipped_steps(incidents: Sequence[Incident]) -> Sequence[int]:
    """The steps that take the batch after their own, as their own is skipped; sorted."""
    return sorted(one.bad_step for one in incidents if one.skipped_first is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRange:
    """Samples, positions `first` to `last`, that were left out on purpose just before `step`, as its numbers were bad
    twice."""

    step: int
    first: int
    last: int


def skipped_ranges(incidents: Sequence[Incident]) -> Sequence[SkippedRange]:
    """The samples that a run with these incidents left out, in the order of steps."""
    found = [
        SkippedRange(step=one.bad_step, first=one.skipped_first, last=one.skipped_last)
        for one in incidents
        if one.skipped_first is not None and one.skipped_last is not None
    ]
    return sorted(found, key=lambda one: one.step)


def lost_by_cause(incidents: Sequence[Incident], back: Sequence[BackAtWork]) -> Mapping[str, float]:
    """Seconds that failures cost, by their cause, the costliest first."""
    back_after_s = {one.generation: one.back_after_s for one in back}
    lost: dict[str, float] = {}
    for one in incidents:
        spent_s = one.lost_s + one.found_after_s + back_after_s.get(one.generation + 1, 0.0)
        lost[one.cause] = lost.get(one.cause, 0.0) + spent_s
    return dict(sorted(lost.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLine:
    """The start `generation` of a run went on after `steps_done` steps; `at` is UTC, ISO 8601."""

    generation: int
    steps_done: int
    at: str


def append_start(path: Path, line: StartLine) -> None:
    """Add one line; raises RunFailed on a full disk."""
    try:
        append_line(path, json.dumps(asdict(line)))
    except OSError as error:
        raise cannot_write(path, error) from error


def read_starts(path: Path) -> Sequence[StartLine]:
    """All lines, none where there is no file; one that is being written is left out. Raises PlaitError, with its
    number, for a line that is none."""
    try:
        lines = read_regular_file(path).split(b"\n")[:-1] if path.exists() else []
    except ValueError as error:
        raise PlaitError(f"{path} cannot be read ({error}); move it away") from None
    starts = []
    for number, line in enumerate(lines, start=1):
        try:
            starts.append(typed_value(StartLine, parse_json(line)))
        except ValueError as error:
            raise PlaitError(f"{path}:{number} is no start of a run ({error}); take the line out") from None
    return starts


def generation_of(step: int, starts: Sequence[StartLine]) -> int:
    """The newest start that was before a step, which therefore took it; 0 where none is known."""
    return next((one.generation for one in reversed(starts) if one.steps_done < step), 0)
