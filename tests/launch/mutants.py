"""Damaged JSON values for tests that feed them to whoever reads what another host sent; the same ones for one seed."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1 << 62, 10**400, -(10**30), 0.5, math.nan, math.inf, -math.inf, 1e308, "", "a",
    "a" * 5000, "../..", "/etc/passwd", "\x1b[2J", "\ud800", "two\nlines", "\u202e", [], {}, [[]], {"a": 1}, [None],
    json.loads("[" * 200 + "]" * 200),
)  # fmt: skip
"""What is put in place of any value."""


def mutants(value: Any, count: int, seed: int) -> Iterator[Any]:
    """So many copies of a JSON value, each damaged in one to three places."""
    dice = random.Random(seed)
    for _ in range(count):
        damaged = copy.deepcopy(value)
        for _ in range(dice.randint(1, 3)):
            damaged = _damaged(damaged, dice)
        yield damaged


def _damaged(value: Any, dice: random.Random) -> Any:
    """The value with one change: at its top, or somewhere below."""
    if not isinstance(value, dict | list) or not value or dice.random() < 0.1:
        return dice.choice(ODD_VALUES)
    key = dice.choice(list(value)) if isinstance(value, dict) else dice.randrange(len(value))
    change = dice.choice(("below", "below", "remove", "add", "rename"))
    if change == "below":
        value[key] = _damaged(value[key], dice)
    elif change == "remove":
        del value[key]
    elif isinstance(value, list):
        value.insert(key, dice.choice(ODD_VALUES))
    elif change == "add":
        value[dice.choice(("more", "", "__class__", "\x1b[0m"))] = dice.choice(ODD_VALUES)
    else:
        value[f"{key}_"] = value.pop(key)
    return value
