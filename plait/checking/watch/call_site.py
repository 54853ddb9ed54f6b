"""Finds the line of the user's program that made a call."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path

_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_OWN = str(Path(__file__).resolve().parents[1])


def call_site() -> str:
    """The innermost line outside of libraries that is being executed, such as "train.py:41"; empty if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_library(name):
            return f"{_short(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def call_path() -> str:
    """All lines outside of libraries that are being executed, innermost first: they distinguish two losses for which
    one helper calls backward."""
    lines, frame = [], sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_library(name):
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


@cache
def is_library(name: str) -> bool:
    """Whether a file of Python was installed, wherever packages are (in the environment, below it, in a container's
    system, by `pip install --target`), or belongs to this check; such lines say little to the program's author."""
    if name.startswith((_STANDARD_LIBRARY, str(Path(_STANDARD_LIBRARY).resolve()), _OWN, "<")):
        return True
    path = Path(name).resolve()
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return True
    package = path
    while (package.parent / "__init__.py").exists():
        package = package.parent
    return package.is_dir() and _holds_installed_packages(package.parent)


@cache
def _holds_installed_packages(folder: Path) -> bool:
    return any(folder.glob("*.dist-info"))


def _short(name: str) -> str:
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name
