"""A screen that also tells somebody what a run notes: a save that failed leaves no other trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from plait.report.metrics import EvalReport, StepReport
from plait.screen.screen import Screen, ShowProgress, StepDisplay, TextPiece

Heard = Callable[[str], None]
"""Takes the text of a note, in the thread that shows it."""


class ListeningScreen:
    """Shows all on another screen, and hands the notes of runs to `heard` as well."""

    def __init__(self, screen: Screen, heard: Heard) -> None:
        self._screen, self._heard = screen, heard

    @property
    def columns(self) -> int | None:
        return self._screen.columns

    @property
    def encoding(self) -> str:
        return self._screen.encoding

    def print(self, text: str) -> None:
        self._screen.print(text)

    def print_pieces(self, pieces: Sequence[TextPiece]) -> None:
        self._screen.print_pieces(pieces)

    def progress(self) -> AbstractContextManager[ShowProgress]:
        return self._screen.progress()

    def steps(self, total_steps: int, steps_done: int = 0) -> StepDisplay:
        return _ListeningSteps(self._screen.steps(total_steps, steps_done), self._heard)


class _ListeningSteps:
    def __init__(self, display: StepDisplay, heard: Heard) -> None:
        self._display, self._heard = display, heard

    def step(self, report: StepReport) -> None:
        self._display.step(report)

    def evaluation(self, report: EvalReport) -> None:
        self._display.evaluation(report)

    def note(self, text: str) -> None:
        self._heard(text)
        self._display.note(text)

    def close(self) -> None:
        self._display.close()
