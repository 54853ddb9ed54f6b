"""The file of results: one JSON line a case, safe on the disk before the next case begins."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.errors import PlaitError


def read_lines(path: Path, key: str = "key") -> list[dict[str, Any]]:
    """All finished cases, each known by its `key`.

    A last line without its newline was being written when the lab died, and is left out.
    """
    if not path.exists():
        return []
    whole = path.read_text().split("\n")[:-1]
    try:
        lines = [json.loads(line) for line in whole]
    except ValueError as error:
        raise PlaitError(f"{path} is no file of the lab's results ({error}); name another one") from None
    if any(not isinstance(line, dict) or key not in line for line in lines):
        raise PlaitError(f"{path} is no file of the lab's results; name another one")
    return lines


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Add a case, behind whole lines only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)
        file.write(json.dumps(values, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
