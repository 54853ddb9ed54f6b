"""Text in lines that fit a terminal, broken between words, never between a number and its unit."""

from __future__ import annotations

import re
from textwrap import fill

from plait.checked_json import printable

TEXT_COLUMN = 9
"""Where the text of a line begins, after its key: "model    1.38M parameters"."""
LEAST_TEXT_COLUMNS = 25
_NUMBER_AND_UNIT = re.compile(
    r"(\d) ((?:s|ms|µs|ns|min|h|[KMGT]?i?B|[KMGT]iB/s|[KMGTk]?bit/s|GB/s|[KMGTP]?FLOP/s|[kK]?Wh|tokens/s|steps?)\b)"
)
_GAP = re.compile(r" {2,}")


def wrapped(text: str, columns: int | None) -> str:
    """The text with every line in so many columns at most; None leaves lines whole. Signs that a terminal would obey
    are taken out: names and sentences may come from files that somebody else wrote.

    A line that goes on is indented to where its last column of text began. Words that are longer stay whole, so that
    paths and commands can be copied.
    """
    text = printable(text)
    if columns is None:
        return text
    return "\n".join(_wrapped_line(line, columns) for line in text.split("\n"))


def _wrapped_line(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    kept = _NUMBER_AND_UNIT.sub("\\1\u00a0\\2", line)
    indent = " " * _indent_of(line, columns)
    lines = fill(kept, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\u00a0", " ")


def _indent_of(line: str, columns: int) -> int:
    """The column where the rest of a line goes on: below its text, or below the first word after a dot."""
    starts = [gap.end() for gap in _GAP.finditer(line) if gap.end() <= columns - LEAST_TEXT_COLUMNS]
    start = max([*starts, min(TEXT_COLUMN, columns // 4)])
    return start + 2 if line[start : start + 2] == "· " else start
