"""Damaged files for the fuzzer: half of the mutants stay valid JSON or TOML with odd values, half have odd bytes."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Callable
from typing import Any

import tomli_w

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 10**400, -(10**400), 0.5, -0.0, 1e-300, 1e308,
    float("nan"), float("inf"), "", "auto", "x" * 5000, "\x00", "\x1b[2J", "é😀", "../../etc/passwd", "60 steps",
    "never", [], [[]], {}, [1, "a", None], {"a": {"b": []}}, {"": 1},
)  # fmt: skip
DEEP = 3000


def json_mutant(draw: random.Random, data: bytes) -> bytes:
    """A JSON text with one to three values, keys or entries changed."""
    values = json.loads(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        values = _changed(draw, values)
    text = json.dumps(values, indent=draw.choice((None, 2)))
    return text.replace('"<deep>"', "[" * DEEP + "]" * DEEP).encode("utf-8", "surrogatepass")


def toml_mutant(draw: random.Random, data: bytes) -> bytes:
    """A TOML text with one to three values, keys or entries changed."""
    values = tomllib.loads(data.decode())
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        values = _changed(draw, values)
    try:
        text = tomli_w.dumps(values if isinstance(values, dict) else {"all": values})
    except (TypeError, ValueError, AttributeError):  # values that TOML has no word for
        return byte_mutant(draw, data)
    return text.replace('"<deep>"', "[" * DEEP + "]" * DEEP).encode()


def byte_mutant(draw: random.Random, data: bytes) -> bytes:
    """The bytes with a bit flipped, a part cut out or put in twice, or other bytes in between."""
    kinds: tuple[Callable[[random.Random, bytes], bytes], ...] = (_flip, _cut, _double, _insert, _truncate)
    return draw.choice(kinds)(draw, data)


def _flip(draw: random.Random, data: bytes) -> bytes:
    changed, at = bytearray(data), draw.randrange(max(1, len(data)))
    if changed:
        changed[at] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(draw: random.Random, data: bytes) -> bytes:
    first, last = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:first] + data[last:]


def _double(draw: random.Random, data: bytes) -> bytes:
    first, last = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return data[:last] + data[first:]


def _insert(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    odd = draw.choice((b"\x00", b"\xff\xfe", b"9" * 5000, b"[" * DEEP, b'"', b"\n", draw.randbytes(8)))
    return data[:at] + odd + data[at:]


def _truncate(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.choice((0, 1, len(data) // 2, max(0, len(data) - 1)))]


def _changed(draw: random.Random, values: Any) -> Any:
    """The same with one value, key or entry changed, somewhere inside."""
    if not isinstance(values, dict | list) or not values or draw.random() < 0.15:
        return draw.choice((*ODD_VALUES, "<deep>", _near(draw, values)))
    if isinstance(values, list):
        at = draw.randrange(len(values))
        return [_changed(draw, value) if place == at else value for place, value in enumerate(values)]
    key, what = draw.choice(list(values)), draw.random()
    if what < 0.15:
        return {name: value for name, value in values.items() if name != key}
    if what < 0.25:
        return {(name[::-1] if name == key else name): value for name, value in values.items()}
    if what < 0.3:
        return {**values, draw.choice(("", "extra", "\x1b[31m")): draw.choice(ODD_VALUES[:14])}
    return {name: _changed(draw, value) if name == key else value for name, value in values.items()}


def _near(draw: random.Random, value: Any) -> Any:
    """A value of the same type, where it has one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draw.choice((value + 1, value * 1000, -value, value // 7 if isinstance(value, int) else value / 7))
    if isinstance(value, str):
        return draw.choice((value + "x", value[1:], value.upper()))
    return draw.choice(ODD_VALUES)
