"""Texts for a terminal of 80 columns, kept word for word; UPDATE_GOLDEN=1 writes them again for review."""

from __future__ import annotations

import os
from pathlib import Path

from plait.screen.screen import wrapped

GOLDEN = Path(__file__).parents[1] / "golden"


def assert_golden(name: str, told: str) -> None:
    """The text, wrapped as on a terminal of 80 columns, is the one in the file."""
    text, golden = wrapped(told, 80) + "\n", GOLDEN / f"screen-{name}.txt"
    assert max(map(len, text.splitlines())) <= 80
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    kept = golden.read_text(encoding="utf-8")
    assert text == kept, f"{golden} says otherwise; if the new text is right, write it by UPDATE_GOLDEN=1"
