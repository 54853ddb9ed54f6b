"""The screen of the command line: a terminal, or a log where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from plait.screen.console import REFRESH_EVERY_S, Console
from plait.screen.screen import ShowProgress, TextPiece, in_brackets, wrapped

WIDEST_COLUMNS = 110
"""Longer lines are hard to read, however wide a terminal is."""
PROGRESS_LINE_EVERY_S = 10.0


class TerminalScreen:
    """Wraps lines at words on a terminal; elsewhere every line stays whole, so that programs can read it."""

    def __init__(self, rich: RichConsole, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rich, self._clock = rich, clock

    @property
    def columns(self) -> int | None:
        return min(self._rich.width, WIDEST_COLUMNS) if self._rich.is_terminal else None

    @property
    def encoding(self) -> str:
        return self._rich.encoding

    def print(self, text: str) -> None:
        self._rich.print(wrapped(text, self.columns), markup=False, highlight=False, soft_wrap=True)

    def print_pieces(self, pieces: Sequence[TextPiece]) -> None:
        if self._rich.color_system is None or self._rich.no_color:
            self._rich.print(in_brackets(pieces), markup=False, highlight=False, soft_wrap=True)
            return
        text = Text.assemble(*((part, "" if kind == "plain" else "bold green") for part, kind in pieces))
        self._rich.print(text, soft_wrap=True)

    @contextmanager
    def progress(self) -> Iterator[ShowProgress]:
        """A bar that is gone at the end; in a log a line each PROGRESS_LINE_EVERY_S, and none in the first. Starts no
        thread."""
        if not self._rich.is_terminal:
            yield self._progress_lines()
            return
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.percentage:>3.0f} %"))
        remaining = TimeRemainingColumn(compact=True)
        bar = Progress(*columns, remaining, console=self._rich, transient=True, auto_refresh=False)
        due = self._every(REFRESH_EVERY_S, at_once=True)

        def show(done: int, total: int, stage: str) -> None:
            if not bar.tasks:  # a bar says from the first what it is about
                bar.add_task(stage, total=None)
                bar.start()
            news = bar.tasks[0].description != stage
            bar.update(bar.task_ids[0], completed=done, total=total or None, description=stage)
            if news or due():
                bar.refresh()

        try:
            yield show
        finally:
            bar.stop()

    def steps(self, total_steps: int, steps_done: int = 0) -> Console:
        return Console(total_steps, steps_done, screen=self._rich, clock=self._clock)

    def _progress_lines(self) -> ShowProgress:
        due = self._every(PROGRESS_LINE_EVERY_S, at_once=False)

        def show(done: int, total: int, stage: str) -> None:
            if due():
                self.print(f"working  {stage}{f', {done / total:.0%}' if total else ''}")

        return show

    def _every(self, interval_s: float, *, at_once: bool) -> Callable[[], bool]:
        """Answers True when this many seconds went by since it last did."""
        last_s = self._clock() - (interval_s if at_once else 0.0)

        def due() -> bool:
            nonlocal last_s
            if self._clock() - last_s < interval_s:
                return False
            last_s = self._clock()
            return True

        return due
