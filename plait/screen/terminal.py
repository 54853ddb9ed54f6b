"""The screen of the command line: a terminal, or a log where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from plait.screen.console import LINE_EVERY_S, MOVES_PER_S, SPINNER, Console
from plait.screen.screen import ShowProgress, TextPiece, in_brackets, wrapped
from plait.screen.ticker import TICK_S, ticking
from plait.units import format_duration

WIDEST_COLUMNS = 110
"""Longer lines are hard to read, however wide a terminal is."""


class TerminalScreen:
    """Wraps lines at words on a terminal; elsewhere every line stays whole, so that programs can read it."""

    def __init__(
        self, rich: RichConsole, *, clock: Callable[[], float] = time.monotonic, tick_s: float = TICK_S
    ) -> None:
        self._rich, self._clock, self._tick_s = rich, clock, tick_s
        self._printed_s = clock()
        """When the last line was printed, or this began: a log's silence counts over all that a command does."""

    @property
    def columns(self) -> int | None:
        return min(self._rich.width, WIDEST_COLUMNS) if self._rich.is_terminal else None

    @property
    def encoding(self) -> str:
        return self._rich.encoding

    def print(self, text: str) -> None:
        self._printed_s = self._clock()
        self._rich.print(wrapped(text, self.columns), markup=False, highlight=False, soft_wrap=True)

    def print_pieces(self, pieces: Sequence[TextPiece]) -> None:
        self._printed_s = self._clock()
        if self._rich.color_system is None or self._rich.no_color:
            self._rich.print(in_brackets(pieces), markup=False, highlight=False, soft_wrap=True)
            return
        text = Text.assemble(*((part, "" if kind == "plain" else "bold green") for part, kind in pieces))
        self._rich.print(text, soft_wrap=True)

    @contextmanager
    def progress(self) -> Iterator[ShowProgress]:
        """A bar that moves by itself and is gone at the end; in a log a line wherever nothing was printed for
        LINE_EVERY_S, whether or not something new was shown."""
        if not self._rich.is_terminal:
            lines = _ProgressLines(self.print, lambda: self._printed_s, self._clock)
            with ticking(lines.look, self._tick_s):
                yield lines.show
            return
        columns = (
            SpinnerColumn(SPINNER),
            TextColumn("{task.description}"),
            BarColumn(bar_width=8),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(compact=True),
        )
        bar = Progress(*columns, console=self._rich, transient=True, refresh_per_second=MOVES_PER_S)

        def show(done: int, total: int, stage: str) -> None:
            if not bar.tasks:  # a bar says from the first what it is about
                bar.add_task(stage, total=None)
                bar.start()
            news = bar.tasks[0].description != stage
            bar.update(bar.task_ids[0], completed=done, total=total or None, description=stage, refresh=news)

        try:
            yield show
        finally:
            bar.stop()

    def steps(self, total_steps: int, steps_done: int = 0) -> Console:
        return Console(total_steps, steps_done, screen=self._rich, clock=self._clock, tick_s=self._tick_s)


class _ProgressLines:
    """Progress in a log: what was shown last, in a line wherever nothing was printed for LINE_EVERY_S."""

    def __init__(self, log: Callable[[str], None], printed_s: Callable[[], float], clock: Callable[[], float]) -> None:
        self._log, self._printed_s, self._clock, self._lock = log, printed_s, clock, Lock()
        self._text, self._stage = "", ""
        self._began_s = clock()

    def show(self, done: int, total: int, stage: str) -> None:
        with self._lock:
            if stage != self._stage:
                self._stage, self._began_s = stage, self._clock()
            self._text = f"working  {stage}{f', {done / total:.0%}' if total else ''}"
            self._print_if_due("")

    def look(self) -> None:
        """Say the same again where nothing new was shown for long, with the time that it takes already."""
        with self._lock:
            if self._text:
                passed_s = round(self._clock() - self._began_s)
                self._print_if_due(f", {format_duration(passed_s)} so far" if passed_s else "")

    def _print_if_due(self, end: str) -> None:
        if self._clock() - self._printed_s() >= LINE_EVERY_S:
            self._log(f"{self._text}{end}")
