"""Files that a command writes beside its answer: refused before the work where they cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

from plait.errors import PlaitError


def check_output_file(file: Path | None) -> None:
    """Raise PlaitError for a requested output file in a folder that is missing or cannot be written to."""
    if file is None:
        return
    if not file.parent.is_dir() or file.is_dir():
        raise PlaitError(f"cannot write {file}: name a file in a folder that exists")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise PlaitError(f"cannot write {file}: you may not write there; name another file")


def write_output_file(file: Path, text: str) -> None:
    """Write a requested output file; raises PlaitError with the reason where the disk refuses it."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlaitError(f"cannot write {file}: {error.strerror}; name another file") from None
