"""Destinations of a command's output: a terminal, a log, a notebook, or nowhere. Commands know nothing else of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from textwrap import fill
from typing import Literal, Protocol

from plait.checked_json import printable
from plait.report.metrics import EvalReport, StepReport

ShowProgress = Callable[[int, int, str], None]
"""Takes how much is done, of how much (0: unknown), and the stage in words."""
Log = Callable[[str], None]
"""Prints one or several lines."""


TextPiece = tuple[str, Literal["plain", "emphasized"]]
"""A part of a text, and whether it stands out."""


def in_brackets(pieces: Sequence[TextPiece]) -> str:
    """A text for a screen without colours: what stands out is in double brackets."""
    return "".join(text if kind == "plain" else f"⟦{text}⟧" for text, kind in pieces)


class StepDisplay(Protocol):
    """The display of a run's steps as they come."""

    def step(self, report: StepReport) -> None: ...
    def evaluation(self, report: EvalReport) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None:
        """No further report comes; a second call does nothing."""
        ...


class Screen(Protocol):
    """All that commands print goes through it."""

    @property
    def columns(self) -> int | None:
        """Width that lines are wrapped to; None: lines stay whole, as in a log."""
        ...

    @property
    def encoding(self) -> str:
        """In which the text is shown; a curve is drawn in characters that it has."""
        ...

    def print(self, text: str) -> None:
        """Show one or several lines of plain text."""
        ...

    def print_pieces(self, pieces: Sequence[TextPiece]) -> None:
        """Show a text whose lines stay as they are, parts of it in colour, or in brackets where there are no
        colours."""
        ...

    def progress(self) -> AbstractContextManager[ShowProgress]:
        """While the block lasts, calls of what it gives show how far something is."""
        ...

    def steps(self, total_steps: int, steps_done: int = 0) -> StepDisplay:
        """A display of a run that goes on from `steps_done`; the caller closes it."""
        ...


class SilentScreen:
    """Shows nothing: for callers from Python who only want values."""

    columns = None
    encoding = "utf-8"

    def print(self, text: str) -> None: ...
    def print_pieces(self, pieces: Sequence[TextPiece]) -> None: ...

    @contextmanager
    def progress(self) -> Iterator[ShowProgress]:
        yield ignore_progress

    def steps(self, total_steps: int, steps_done: int = 0) -> StepDisplay:
        return _SilentSteps()


def ignore_progress(done: int, total: int, stage: str) -> None:
    """A ShowProgress that shows nothing."""


class _SilentSteps:
    def step(self, report: StepReport) -> None: ...
    def evaluation(self, report: EvalReport) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


# Text in lines that fit a terminal, broken between words, never between a number and its unit.


TEXT_COLUMN = 9
"""The column at which a line's text begins, after its key: "model    1.38M parameters"."""
LEAST_TEXT_COLUMNS = 25
_NUMBER_AND_UNIT = re.compile(
    r"(\d) ((?:s|ms|µs|ns|min|h|[KMGT]?i?B|[KMGT]iB/s|[KMGTk]?bit/s|GB/s|[KMGTP]?FLOP/s|[kK]?Wh|tokens/s|steps?)\b)"
)
_GAP = re.compile(r" {2,}")


def wrapped(text: str, columns: int | None) -> str:
    """The text with every line in this many columns at most; None leaves lines whole. Signs that a terminal would obey
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
