"""Lines in so many columns."""

from __future__ import annotations

import pytest

from plait.screen.screen import wrapped

LINE = "speed    9.93K tokens/s, 0.412 s a step (planned 0.4 s: 3.1% slower), 12.5 MiB of 2 GiB, MFU 60%"


def test_without_a_width_a_line_stays_whole():
    assert wrapped(LINE * 9, None) == LINE * 9


@pytest.mark.parametrize("columns", range(20, 99))
def test_no_line_is_wider_and_no_number_loses_its_unit(columns):
    lines = wrapped(LINE, columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert " ".join(" ".join(lines).split()) == " ".join(LINE.split())
    for kept in ("9.93K tokens/s", "0.412 s", "0.4 s", "12.5 MiB", "2 GiB"):
        assert kept in wrapped(LINE, columns) or columns < 25, (kept, columns)


def test_a_line_goes_on_below_its_text_its_dot_or_its_last_column():
    assert wrapped("data     aaaa bbbb cccc dddd eeee ffff", 36).splitlines()[1] == " " * 9 + "ffff"
    assert wrapped("         · aaaa bbbb cccc dddd eeee ff", 36).splitlines()[1] == " " * 11 + "ff"
    assert wrapped("         first part    aaaa bbbb cccc dddd eeee ffff", 48).splitlines()[1] == " " * 23 + "ffff"


def test_a_word_that_is_too_long_stays_whole_so_that_it_can_be_copied():
    path = "/a/long/path/" + "x" * 90
    assert path in wrapped(f"wrote    {path}", 80)


@pytest.mark.parametrize("columns", [None, 20, 80])
def test_signs_that_a_terminal_would_obey_are_taken_out(columns: int | None) -> None:
    text = "run      a\x1b[2Jb\x07 \u202ec\ud800 d\n         é 日本"
    assert wrapped(text, columns) == "run      a[2Jb c d\n         é 日本"
