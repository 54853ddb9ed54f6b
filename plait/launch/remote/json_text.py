"""JSON that another host sent: plain values of bounded depth, without what could do harm where it is printed."""

from __future__ import annotations

import unicodedata
from typing import Any

from plait.checked_json import parse_json

_HARMFUL = {"Cc", "Cs"}
# What makes a terminal show text in another order than it is written in.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_KEPT = frozenset("\n\t")


def parse_frame_text(text: bytes) -> Any:
    """The value of a JSON text; raises ValueError unless it is UTF-8 without NUL, of bounded depth and with finite
    numbers of bounded length alone.

    Its strings come without control characters other than line breaks and tabs: an escape sequence would be obeyed by
    the terminal that shows it.
    """
    return parse_json(text.decode("utf-8"), text=_checked_text)


def printable(text: str) -> str:
    """The text without control characters, line breaks and tabs apart, and without half characters."""
    if text.isprintable() and text.isascii():
        return text
    return "".join(sign for sign in text if sign in _KEPT or not _is_harmful(sign))


def _is_harmful(sign: str) -> bool:
    return sign in _REORDERING or unicodedata.category(sign) in _HARMFUL


def _checked_text(text: str) -> str:
    if "\0" in text:  # ends a name for the system, and so would make it another one
        raise ValueError("its text has a NUL")
    return printable(text)
