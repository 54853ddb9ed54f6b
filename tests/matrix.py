"""Rows of a matrix of which few run each time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

CASES = int(os.environ.get("PLAIT_FUZZ_CASES", "100"))
"""Random cases of a kind in `make test-all`; `make fuzz` has more. A case is the same whatever their number."""


def few_fast(rows: Iterable[Any], *fast: Any) -> list[Any]:
    """The rows for `parametrize`, all but the `fast` ones only for `make test-all`."""
    kept = list(rows)
    assert all(one in kept for one in fast), "a fast row that is none of the matrix"
    return [row if row in fast else slow(row) for row in kept]


def slow(row: Any) -> Any:
    """One row for `make test-all`; a tuple holds the values of several parameters."""
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow)
