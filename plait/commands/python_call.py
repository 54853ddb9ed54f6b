"""A command that is called from somebody's Python program: its signals, its errors, and what it shows meanwhile."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, ParamSpec, TypeVar

from rich.console import Console

from plait import arguments
from plait.checked_json import printable
from plait.errors import Interrupted, PlaitError, file_error_sentence
from plait.launch.local.signals import interrupting_signals
from plait.launch.local.torchrun import torchrun_context
from plait.report.metrics import EvalReport, StepReport
from plait.screen.notebook import NotebookScreen, notebook_output
from plait.screen.screen import Screen, ShowProgress, SilentScreen, StepDisplay, TextPiece
from plait.screen.terminal import TerminalScreen

ProgressDisplay = Literal["auto", "lines", "off"]
"""What is shown while work goes on: "auto" draws a bar in a notebook or on a terminal, "lines" prints what the command
prints, "off" shows nothing."""


_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")


def known_keywords(function: Callable[_Parameters, _Returned]) -> Callable[_Parameters, _Returned]:
    """The function, which answers a keyword that it does not take with one sentence that says what to write, also where
    the keyword is a setting of the recipe."""
    return arguments.with_known_keywords(hint=_as_setting)(function)


def _as_setting(unknown: str, known: Sequence[str]) -> str:
    from plait.recipe.refusal import setting_named

    if "overrides" in known and (setting := setting_named(unknown)):
        return f'as a setting of the recipe write overrides={{"{setting}": …}}'
    return ""


@contextmanager
def as_command() -> Iterator[None]:
    """Within the block a stop signal raises Interrupted and a file that cannot be used PlaitError, as for a command;
    their sentences speak of the call.

    Raises PlaitError under torchrun: its other ranks would have no value to return.
    """
    if torchrun_context() is not None:
        raise PlaitError("from Python plait starts its workers itself; start this program without torchrun")
    try:
        with interrupting_signals():
            yield
    except OSError as error:
        if error.filename is None:
            raise
        raise PlaitError(file_error_sentence(error)) from error
    except (PlaitError, Interrupted) as error:
        error.args = (in_call_words(str(error)),)
        raise


def screen_for(progress: ProgressDisplay) -> Screen:
    """The screen that a call shows its progress on."""
    if progress == "off":
        return SilentScreen()
    if progress == "lines":
        return CallScreen(TerminalScreen(Console(file=sys.stdout)))
    if show_html := notebook_output():
        return CallScreen(NotebookScreen(show_html))
    return CallScreen(TerminalScreen(Console())) if sys.stdout.isatty() else SilentScreen()


class CallScreen:
    """Another screen, on which a command's words speak of the call."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    @property
    def columns(self) -> int | None:
        return self._screen.columns

    @property
    def encoding(self) -> str:
        return self._screen.encoding

    def print(self, text: str) -> None:
        self._screen.print(in_call_words(text))

    def print_pieces(self, pieces: Sequence[TextPiece]) -> None:
        self._screen.print_pieces(pieces)

    @contextmanager
    def progress(self) -> Iterator[ShowProgress]:
        with self._screen.progress() as show:
            yield lambda done, total, stage: show(done, total, in_call_words(stage))

    def steps(self, total_steps: int, steps_done: int = 0) -> StepDisplay:
        return _CallSteps(self._screen.steps(total_steps, steps_done))


class _CallSteps:
    """Another display, whose notes speak of the call."""

    def __init__(self, display: StepDisplay) -> None:
        self._display = display

    def step(self, report: StepReport) -> None:
        self._display.step(report)

    def evaluation(self, report: EvalReport) -> None:
        self._display.evaluation(report)

    def note(self, text: str) -> None:
        self._display.note(in_call_words(text))

    def close(self) -> None:
        self._display.close()


def in_call_words(text: str) -> str:
    """A command's words for somebody who called a function: "the same call" for "the same command", arguments for
    options, and the command in full where Python has no such argument.

    What is to be typed on other hosts stays as it is; signs that a terminal would obey are taken out.
    """
    text = printable(text)
    if "plait join" in text:
        return text.replace("the same command", "the same call")
    for pattern, words in _CALL_WORDS:
        text = re.sub(pattern, words, text, flags=re.MULTILINE)
    return text


def _call_of_run(found: re.Match[str]) -> str:
    """plait sample NAME as a call."""
    function = {"sample": "sample", "eval": "evaluate"}[found[2]]
    return f"{found[1]}plait.{function}({json.dumps(shlex.split(found[3])[0], ensure_ascii=False)})"


_CALL_WORDS: Sequence[tuple[str, str | Callable[[re.Match[str]], str]]] = (
    (r"\bthe same command\b", "the same call"),
    (r"\b(its|the run's) command\b", r"\1 call"),
    (r"--no-timing\b", 'timing="none"'),
    (r"--why gives the reasons", "Run.plan.reasons has the reasons"),
    (r"^(next {5}| {9})plait (sample|eval) (.+)$", _call_of_run),
    (r"plait probe --again", "plait.probe(again=True)"),
    (r"(?<!plait train )--replan\b", "plait train --replan"),
    (r"--(workers|threads|hosts) (\d+)", r"\1 = \2"),
    (r"--secret-file\b", "secret_file="),
    (r"--pool\b|--from\b", "pool="),
    (r"--(hosts|address|port|workers|threads|files|cluster|availability)\b", r"\1="),
    (r"plait train RECIPE", 'plait.train("RECIPE")'),
)
"""Patterns of a command's words, and what stands there in Python."""
