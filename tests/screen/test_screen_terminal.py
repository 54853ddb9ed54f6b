"""The command line's screen, on a terminal and in a log."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console as RichConsole

from plait.screen.console import LINE_EVERY_S
from plait.screen.screen import Screen, SilentScreen
from plait.screen.terminal import TerminalScreen


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def terminal(out: io.StringIO, width: int) -> TerminalScreen:
    return TerminalScreen(RichConsole(file=out, width=width, force_terminal=True, color_system=None))


def test_a_log_has_whole_lines_without_markup():
    out = io.StringIO()
    text = "reason   [bold]a sentence[/bold] " + "that is longer than a terminal is wide " * 4
    TerminalScreen(RichConsole(file=out, width=80)).print(text)
    assert out.getvalue() == f"{text}\n"


@pytest.mark.parametrize(("width", "columns"), [(40, 40), (80, 80), (250, 110)])
def test_a_terminal_wraps_at_its_width_and_never_beyond_what_is_easy_to_read(width, columns):
    out = io.StringIO()
    screen = terminal(out, width)
    screen.print("reason   " + "some words " * 40)
    assert screen.columns == columns
    assert columns - 11 < max(map(len, out.getvalue().splitlines())) <= columns


def test_progress_in_a_log_is_a_line_now_and_then_and_none_at_first():
    out, clock = io.StringIO(), Clock()
    with TerminalScreen(RichConsole(file=out, width=80), clock=clock).progress() as show:
        for done in range(100):
            show(done, 100, "counting")
            clock.now_s += LINE_EVERY_S / 4
        show(0, 0, "hashing")
    assert out.getvalue().splitlines()[:2] == ["working  counting, 4%", "working  counting, 8%"]
    assert out.getvalue().splitlines()[-1] == "working  hashing" and len(out.getvalue().splitlines()) == 25


def test_a_log_is_not_silent_for_long_across_two_pieces_of_work():
    out, clock = io.StringIO(), Clock()
    screen = TerminalScreen(RichConsole(file=out, width=80), clock=clock)
    for stage in ("counting", "hashing"):
        with screen.progress() as show:
            show(0, 0, stage)
            clock.now_s += 0.6 * LINE_EVERY_S
            show(1, 0, stage)
    assert out.getvalue().splitlines() == ["working  hashing"]


def test_progress_on_a_terminal_is_gone_at_the_end_and_fits():
    out = io.StringIO()
    with terminal(out, 80).progress() as show:
        show(1, 4, "timing steps of layout 2 of 4")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "timing steps of layout 2 of 4" in plain and "25 %" in plain
    assert max(map(len, re.split(r"[\r\n]", plain))) <= 80
    assert out.getvalue().rstrip("\r\n").endswith("\x1b[2K")


def test_nothing_is_drawn_before_there_is_something_to_say():
    out = io.StringIO()
    with pytest.raises(KeyError), terminal(out, 80).progress():
        raise KeyError("what went wrong at once")
    assert out.getvalue() == ""


def test_a_silent_screen_shows_nothing(capsys):
    screen: Screen = SilentScreen()
    screen.print("words")
    with screen.progress() as show:
        show(1, 2, "stage")
    screen.steps(10).close()
    assert capsys.readouterr() == ("", "")
