"""Finds the line of the user's program that made a call."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

_LIBRARIES = tuple({str(Path(sysconfig.get_paths()[kind]).resolve()) for kind in ("stdlib", "purelib", "platlib")})
_OWN = str(Path(__file__).resolve().parents[1])


def call_site() -> str:
    """The innermost line outside of libraries that is being executed, such as "train.py:41"; empty if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_LIBRARIES, _OWN, "<")):
            return f"{_short(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def call_path() -> str:
    """All lines outside of libraries that are being executed, innermost first: they distinguish two losses for which
    one helper calls backward."""
    lines, frame = [], sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_LIBRARIES, _OWN, "<")):
            lines.append(f"{_short(name)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


def called_below(*parts: str) -> bool:
    """Whether a function of one of these library folders is among the callers."""
    frame = sys._getframe(1)
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in parts):
            return True
        frame = frame.f_back
    return False


def _short(name: str) -> str:
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name
