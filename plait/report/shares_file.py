"""runs/NAME/shares.jsonl: which share of the batch each part takes, or how many layers each stage has, from which step
on, and why.

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

from plait.checked_json import parse_json
from plait.errors import PlaitError
from plait.regular_file import follow_no_link, read_regular_file
from plait.report.atomic import cannot_write


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesLine:
    """From `step` on, counted as in metrics.jsonl, the number of sequences that each data-parallel rank takes."""

    step: int
    shares: tuple[int, ...]
    reason: str
    speeds: tuple[float, ...]
    """Measured sequences per second of each data-parallel rank; for a line that moves layers, layers per step of
    each stage."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each stage; empty where they stay as they are."""


def read_shares(path: Path) -> tuple[SharesLine, ...]:
    """All lines, none where there is no file; raises PlaitError naming a line that cannot be obeyed.

    A last line that ends too soon was being written when the run was killed, and no step obeyed it: it is left out.
    """
    if not path.exists():
        return ()
    found: list[SharesLine] = []
    try:
        data = read_regular_file(path)
    except ValueError as error:
        raise PlaitError(f"{path} cannot be read ({error}); take it away to go on with the plan's shares") from None
    for number, text in enumerate(data[: _end(data)[0]].splitlines(), start=1):
        line = _parsed(text)
        if line is None or (found and line.step <= found[-1].step):
            raise PlaitError(
                f"{path}:{number} is no line of shares; bring the file back as plait wrote it, or take it away to go "
                "on with the plan's shares"
            )
        found.append(line)
    return tuple(found)


def check_lines(path: Path, parts: Sequence[int], stage_layers: Sequence[int] = ()) -> None:
    """Raise PlaitError where shares.jsonl does not go with a run of these parts of the batch and these stages.

    Without `stage_layers` there are no stages, or their layers stay.
    """
    for line in read_shares(path):
        layers = line.stage_layers or stage_layers
        if layers and not stage_layers:
            raise PlaitError(
                f"{path} moves layers between stages from step {line.step} on, which only a pipeline with one stage on "
                "each rank and no other parts of the batch does; take the file away to go on with the plan's stages"
            )
        if len(layers) != len(stage_layers) or sum(layers) != sum(stage_layers):
            raise PlaitError(
                f"{path} cuts {sum(layers)} layers into {len(layers)} stages from step {line.step} on, and the plan "
                f"{sum(stage_layers)} into {len(stage_layers)}; take the file away to go on with the plan's stages"
            )
        if len(line.shares) != len(parts) or sum(line.shares) != sum(parts):
            raise PlaitError(
                f"{path} shares {sum(line.shares)} sequences among {len(line.shares)} from step {line.step} on, and "
                f"the plan {sum(parts)} among {len(parts)}; take the file away to go on with the plan's shares"
            )


def append_shares(path: Path, line: SharesLine) -> None:
    """Add a line and wait until it is on the disk; raises RunFailed where the disk refuses it. An incomplete last
    line, left by a kill, is cut off first."""
    values = {key: value for key, value in asdict(line).items() if key != "stage_layers" or line.stage_layers}
    data = json.dumps(values).encode() + b"\n"
    try:
        descriptor = follow_no_link(path, os.O_RDWR | os.O_CREAT)
        try:
            end, between = _end(read_regular_file(path))
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
    """Offset at which whole lines end, and the bytes to write before a new one: a newline if only that is missing."""
    last = data.rfind(b"\n") + 1
    try:
        parse_json(data[last:])
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
        values: Any = parse_json(text)
        lists = {"shares": values["shares"], "speeds": values["speeds"], "stage_layers": values.get("stage_layers", ())}
        line = SharesLine(**{**values, **{key: tuple(value) for key, value in lists.items()}})
    except (ValueError, TypeError, KeyError):
        return None
    counts = (line.step, *line.shares, *line.stage_layers)
    whole = all(type(count) is int and count > 0 for count in counts)
    return line if whole and isinstance(line.reason, str) else None
