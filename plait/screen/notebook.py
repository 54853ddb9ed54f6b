"""A notebook's screen: one output that changes in place, and the sentences that a person has to read below it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape

from plait.report.metrics import EvalReport, StepReport
from plait.screen.console import RecentSteps
from plait.screen.screen import ShowProgress, TextPiece, in_brackets
from plait.units import format_duration

REDRAW_EVERY_S = 0.2
ShowHtml = Callable[[str], None]
"""Replaces what the call's one output shows."""


def notebook_output() -> ShowHtml | None:
    """An output of the notebook cell that runs now; None outside of a notebook."""
    ipython = sys.modules.get("IPython")  # who runs a notebook has imported it
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not shell.has_trait("kernel"):
        return None
    from IPython.display import HTML, display

    handle = None

    def show(html: str) -> None:
        nonlocal handle
        if handle is None:
            handle = display(HTML(html), display_id=True)
        else:
            handle.update(HTML(html))

    return show


class NotebookScreen:
    """Shows the newest progress and all lines so far; redraws at most every REDRAW_EVERY_S. Starts no thread."""

    columns = None
    encoding = "utf-8"

    def __init__(self, show_html: ShowHtml, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._show_html, self._clock = show_html, clock
        self._lines: list[str] = []
        self._bar = ""
        self._drawn_s = clock() - REDRAW_EVERY_S

    def print(self, text: str) -> None:
        self._lines += text.rstrip("\n").split("\n")
        self._draw()

    def print_pieces(self, pieces: Sequence[TextPiece]) -> None:
        self.print(in_brackets(pieces))

    @contextmanager
    def progress(self) -> Iterator[ShowProgress]:
        """A bar that is gone at the end of the block."""
        try:
            yield self.set_bar
        finally:
            self.clear_bar()

    def steps(self, total_steps: int, steps_done: int = 0) -> NotebookSteps:
        return NotebookSteps(self, total_steps, steps_done)

    def set_bar(self, done: int, total: int, text: str) -> None:
        """Show how much of `total` is done; 0 is unknown."""
        amount = f' value="{done}" max="{total}"' if total else ""
        self._bar = f"<progress{amount}></progress> {escape(text)}"
        if self._clock() - self._drawn_s >= REDRAW_EVERY_S or done == total:
            self._draw()

    def clear_bar(self) -> None:
        """Take the bar away."""
        self._bar = ""
        self._draw()

    def _draw(self) -> None:
        self._drawn_s = self._clock()
        lines = f"<pre>{escape(chr(10).join(self._lines))}</pre>" if self._lines else ""
        self._show_html(f"{lines}<div>{self._bar}</div>")


class NotebookSteps:
    """The steps of a run as a bar with the newest loss and speed."""

    def __init__(self, screen: NotebookScreen, total_steps: int, steps_done: int) -> None:
        self._screen, self._total, self._recent = screen, total_steps, RecentSteps()
        screen.set_bar(steps_done, total_steps, "starting")

    def step(self, report: StepReport) -> None:
        self._recent.add(report)
        left = format_duration(round((self._total - report.step) * self._recent.step_s))
        text = f"step {report.step}/{self._total} · loss {report.loss:.3f} · ETA {left}"
        self._screen.set_bar(report.step, self._total, text)

    def evaluation(self, report: EvalReport) -> None:
        self._screen.print(f"step {report.step}: held-out loss {report.eval_loss:.3f}")

    def note(self, text: str) -> None:
        self._screen.print(text)

    def close(self) -> None:
        self._screen.clear_bar()
