"""JSON that another host sent: plain values of bounded depth, without what could do harm where it is printed."""

from __future__ import annotations

import json
import math
import unicodedata
from typing import Any, NoReturn

DEPTH_AT_MOST = 32
"""Objects and arrays within each other; plait's own messages have less than ten."""

_HARMFUL = {"Cc", "Cs"}
# What makes a terminal show text in another order than it is written in.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_KEPT = frozenset("\n\t")


def parse_frame_text(text: bytes) -> Any:
    """The value of a JSON text; raises ValueError unless it is UTF-8 without NUL, of bounded depth and with finite
    numbers alone.

    Its strings come without control characters other than line breaks and tabs: an escape sequence would be obeyed by
    the terminal that shows it.
    """
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
        return _plain(value, DEPTH_AT_MOST)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def printable(text: str) -> str:
    """The text without control characters, line breaks and tabs apart, and without half characters."""
    if text.isprintable() and text.isascii():
        return text
    return "".join(sign for sign in text if sign in _KEPT or not _is_harmful(sign))


def _is_harmful(sign: str) -> bool:
    return sign in _REORDERING or unicodedata.category(sign) in _HARMFUL


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return _checked_text(value)
    if not isinstance(value, list | dict):
        return value
    if depth == 0:
        raise ValueError("its values are nested too deeply")
    if isinstance(value, list):
        return [_plain(item, depth - 1) for item in value]
    return {_checked_text(key): _plain(item, depth - 1) for key, item in value.items()}


def _checked_text(text: str) -> str:
    if "\0" in text:  # ends a name for the system, and so would make it another one
        raise ValueError("its text has a NUL")
    return printable(text)


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_constant(text)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is no number")
