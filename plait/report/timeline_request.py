"""Requests a timeline from a run that is training, through a file in its folder that its first rank answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from plait.checked_json import parse_object
from plait.errors import PlaitError
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file


@dataclass(frozen=True, slots=True)
class TimelineFiles:
    """The two files in a run's folder, which exist only during a request."""

    folder: Path

    @property
    def request(self) -> Path:
        return self.folder / "timeline-request.json"

    @property
    def answer(self) -> Path:
        return self.folder / "timeline-answer.json"

    def ask(self, steps: int) -> None:
        """Request this many steps; raises PlaitError if the folder cannot be written."""
        self.answer.unlink(missing_ok=True)
        replace_file(self.request, json.dumps({"steps": steps}).encode(), failure=PlaitError)

    def requested_steps(self) -> int:
        """The number of requested steps; 0 if there is no request, or no valid one."""
        try:
            steps = parse_object(read_regular_file(self.request, 1024)).get("steps")
        except (OSError, ValueError):
            return 0
        return steps if isinstance(steps, int) and steps > 0 else 0

    def clear(self) -> None:
        """Delete both files."""
        self.request.unlink(missing_ok=True)
        self.answer.unlink(missing_ok=True)
