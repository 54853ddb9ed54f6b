"""runs/NAME/shares.jsonl: which share of the batch each part takes from which step on, and why.

A line is on the disk before the first step that obeys it, and a resume obeys all lines, so that a run's numbers follow
from its seed, its layout and this file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.errors import PlaitError
from plait.report.atomic import cannot_write


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesLine:
    """From `step` on, counted as metrics.jsonl does, each part of the batch takes so many sequences."""

    step: int
    shares: tuple[int, ...]
    reason: str
    speeds: tuple[float, ...]
    """Sequences a second of each part, as measured before."""


def read_shares(path: Path) -> tuple[SharesLine, ...]:
    """All lines, none where there is no file; raises PlaitError naming a line that cannot be obeyed.

    A last line that ends too soon was being written when the run was killed, and no step obeyed it: it is left out.
    """
    if not path.exists():
        return ()
    found: list[SharesLine] = []
    data = path.read_bytes()
    for number, text in enumerate(data[: _end(data)[0]].splitlines(), start=1):
        line = _parsed(text)
        if line is None or (found and line.step <= found[-1].step):
            raise PlaitError(
                f"{path}:{number} is no line of shares; bring the file back as plait wrote it, or take it away to go "
                "on with the plan's shares"
            )
        found.append(line)
    return tuple(found)


def check_lines(path: Path, parts: Sequence[int]) -> None:
    """Raise PlaitError where shares.jsonl does not go with a run of these parts of the batch."""
    for line in read_shares(path):
        if len(line.shares) != len(parts) or sum(line.shares) != sum(parts):
            raise PlaitError(
                f"{path} shares {sum(line.shares)} sequences among {len(line.shares)} from step {line.step} on, and "
                f"the plan {sum(parts)} among {len(parts)}; take the file away to go on with the plan's shares"
            )


def append_shares(path: Path, line: SharesLine) -> None:
    """Add a line and wait until the disk has it; raises RunFailed where the disk says no.

    What a kill left of a torn last line is cut off first.
    """
    data = json.dumps(asdict(line)).encode() + b"\n"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            end, between = _end(path.read_bytes())
            os.ftruncate(descriptor, end)
            if os.pwrite(descriptor, between + data, end) < len(between + data):
                raise OSError(28, "No space left on device")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _sync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def _end(data: bytes) -> tuple[int, bytes]:
    """Where the lines of a file end, and what it takes to begin another one: the last may lack its newline only."""
    last = data.rfind(b"\n") + 1
    try:
        json.loads(data[last:])
    except ValueError:
        return last, b""
    return len(data), b"\n"


def _sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder: a new file is not safe before."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parsed(text: bytes) -> SharesLine | None:
    try:
        values: Any = json.loads(text)
        line = SharesLine(**{**values, "shares": tuple(values["shares"]), "speeds": tuple(values["speeds"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    counts = (line.step, *line.shares)
    whole = all(type(count) is int and count > 0 for count in counts)
    return line if whole and isinstance(line.reason, str) else None
