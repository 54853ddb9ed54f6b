"""JSON that another host sent: plain values of bounded depth, without what could do harm where it is printed."""

from __future__ import annotations

from typing import Any

from plait.checked_json import parse_json, printable


def parse_frame_text(text: bytes) -> Any:
    """The value of a JSON text; raises ValueError unless it is UTF-8 without NUL, of bounded depth and with finite
    numbers of bounded length alone.

    Its strings come without control characters other than line breaks and tabs: an escape sequence would be obeyed by
    the terminal that shows it.
    """
    return parse_json(text.decode("utf-8"), text=_checked_text)


def _checked_text(text: str) -> str:
    if "\0" in text:  # ends a name for the system, and so would make it another one
        raise ValueError("its text has a NUL")
    return printable(text)
