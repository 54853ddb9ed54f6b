"""incidents.jsonl: what went wrong in a run, one line each, and one for each time that it was back at work."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from plait.checked_json import parse_json, typed_value
from plait.errors import PlaitError
from plait.regular_file import append_to_file, read_regular_file

Decision = Literal["started again", "ended", "gave up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One failure of one start (`generation`) of a run.

    `step` is the last that was reported, `resumed_from` the checkpoint's that the run stands at now: the steps between
    were lost, and `lost_s` were spent on them. `rank`, `host` and `device` are None where they are unknown or nobody's.
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
    with append_to_file(path) as file:
        file.write(json.dumps(values, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


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
