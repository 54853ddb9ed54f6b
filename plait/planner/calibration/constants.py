"""The constants of the cost model that were read or fitted; constants.toml says of each where, when and from what."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

CONSTANTS_FILE = Path(__file__).parent / "constants.toml"


def constant(name: str) -> float:
    """The number of this name, in the unit that the file gives."""
    return constant_table()[name]["value"]


def constant_rows(name: str) -> tuple[tuple[float, ...], ...]:
    """The rows of a table of numbers."""
    return tuple(tuple(row) for row in constant_table()[name]["value"])


def constant_fields(name: str) -> Mapping[str, Any]:
    """The values of a group of constants, by the name of the dataclass field that each one sets."""
    return constant_table()[name]["value"]


@cache
def constant_table() -> Mapping[str, Mapping[str, Any]]:
    """Every constant by its name: value, unit, what, read_on, date, source."""
    return tomllib.loads(CONSTANTS_FILE.read_text(encoding="utf-8"))
