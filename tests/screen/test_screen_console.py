"""What a person sees, on terminals of any width and in a log."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from threading import Event

import pytest
from rich.console import Console as Screen

from plait.report.metrics import EvalReport, StepReport
from plait.screen.console import Console, RecentSteps, facts_that_fit


class Clock:
    """A clock that stands until it is told to go."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def report(step: int, loss: float = 3.0, mfu: float | None = 0.614) -> StepReport:
    return StepReport(
        step=step, tokens=step, loss=loss, grad_norm=1, lr=1, step_s=0.5, tokens_per_s=12_345, mfu=mfu, data_wait_s=0
    )


def log(total: int, steps: range, seconds_a_step: float, steps_done: int = 0) -> list[str]:
    out, clock = io.StringIO(), Clock()
    console = Console(total, steps_done, screen=Screen(file=out, width=40), clock=clock)
    for step in steps:
        clock.now_s += seconds_a_step
        console.step(report(step))
    console.close()
    return out.getvalue().splitlines()


def test_a_log_gets_a_line_each_five_percent_when_that_is_sooner():
    lines = log(total=1000, steps=range(1, 1001), seconds_a_step=0.001)
    assert len(lines) == 20
    assert lines[0] == "step 50/1000   · loss 3.000  · ETA 7 min 55 s  · 12.3K tokens/s · MFU 61%"
    assert lines[-1] == "step 1000/1000 · loss 3.000  · ETA 0 s         · 12.3K tokens/s · MFU 61%"
    assert max(map(len, lines)) <= 80


def test_steps_that_were_compiled_do_not_count_as_those_that_come():
    out = io.StringIO()
    console = Console(1000, screen=Screen(file=out, width=40))
    for step in range(1, 51):
        took_s = 8.0 if step <= 2 else 0.5
        console.step(replace(report(step), step_s=took_s, tokens_per_s=12_345 * 0.5 / took_s))
    console.close()
    assert "ETA 7 min 55 s  · 12.3K tokens/s" in out.getvalue().splitlines()[0]
    first = RecentSteps()
    for took_s in (8.0, 8.0, 0.5, 0.5):
        first.add(replace(report(1), step_s=took_s, tokens_per_s=100 / took_s))
    assert (first.step_s, first.tokens_per_s) == (0.5, 200.0)


def test_a_log_gets_a_line_within_ten_seconds_and_after_half_an_hour_each_thirty_when_that_is_sooner():
    lines = log(total=1_000_000, steps=range(1, 1871), seconds_a_step=1.0)
    told = [int(line.split(" ")[1].split("/")[0]) for line in lines]
    assert told[:3] == [9, 18, 27] and told[-3:] == [1791, 1821, 1851]


def test_a_log_says_what_is_waited_for_where_no_step_ends():
    out, clock, looked = io.StringIO(), Clock(), Event()

    class Watched(Clock):
        def __call__(self) -> float:
            looked.set()
            return clock.now_s

    console = Console(24, screen=Screen(file=out, width=40), clock=Watched(), tick_s=0.001)
    console.step(report(4))
    for now_s, words in ((10.0, "working  step 5/24, 10 s so far"), (20.0, "working  step 5/24, 20 s so far")):
        clock.now_s = now_s
        while words not in out.getvalue():
            looked.clear()
            looked.wait(10)
    console.step(report(24))
    clock.now_s = 35.0
    while "working  the held-out loss and the last checkpoint, 15 s so far" not in out.getvalue():
        looked.clear()
        looked.wait(10)
    console.close()


def test_a_resumed_run_goes_on_with_its_shares():
    assert [line.split(" ")[1] for line in log(100, range(58, 66), 0.001, steps_done=57)] == ["60/100", "65/100"]


def test_a_short_run_tells_each_step_once():
    assert len(log(total=3, steps=range(1, 4), seconds_a_step=60)) == 3


def test_evaluations_and_notes_are_told_at_once_and_as_they_are():
    out = io.StringIO()
    console = Console(500, screen=Screen(file=out, width=30))
    console.evaluation(EvalReport(step=200, eval_loss=4.1234, eval_nats_per_byte=1.6234))
    console.note("saved [bold]step 200[/bold] in a sentence that is longer than thirty columns")
    assert out.getvalue().splitlines() == [
        "step 200: held-out loss 4.123 (1.62 nats per byte)",
        "saved [bold]step 200[/bold] in a sentence that is longer than thirty columns",
    ]


def test_the_loss_is_smoothed_and_right_from_the_first_step():
    out, clock = io.StringIO(), Clock()
    console = Console(2, screen=Screen(file=out, width=200), clock=clock)
    console.step(report(1, loss=4.0, mfu=None))
    console.step(report(2, loss=2.0, mfu=None))
    first, second = out.getvalue().splitlines()
    assert "loss 4.000" in first and "MFU" not in first
    assert 2.9 < float(re.findall(r"loss (\S+)", second)[0]) < 3.0


def test_a_mixture_tells_of_its_busiest_expert():
    out = io.StringIO()
    Console(2, screen=Screen(file=out, width=200), clock=Clock()).step(replace(report(2), expert_load_max=1.254))
    assert out.getvalue().endswith("· MFU 61%   · busiest expert 1.25 × the mean\n")


@pytest.mark.parametrize("width", [1, 8, 20, 33, 60, 80, 99, 100, 101, 200])
def test_a_terminal_of_any_width_gets_one_line_in_place(width):
    out, clock = io.StringIO(), Clock()
    screen = Screen(file=out, width=width, height=20, force_terminal=True, color_system=None, legacy_windows=False)
    console = Console(1000, screen=screen, clock=clock)
    for step in (1, 500, 1000):
        clock.now_s += 1
        console.step(report(step))
    console.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    frames = [frame for frame in re.split(r"[\r\n]", plain) if frame.strip()]
    assert max(map(len, frames)) <= width
    # In place: the cursor never has to go up, which it would for a bar of two lines.
    assert "\x1b[1A" not in out.getvalue()
    if width >= 20:
        assert "step 1000/1000" in frames[-1]
    if width >= 80:
        assert "loss 3.000 · ETA 0 s · 12.3K tokens/s · MFU 61%" in frames[-1]
    assert ("━" in plain) == (width >= 100)


def test_a_note_comes_above_the_bar():
    out = io.StringIO()
    console = Console(10, screen=Screen(file=out, width=80, force_terminal=True, color_system=None))
    console.step(report(10))
    console.note("held fast")
    console.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    after_note = plain[plain.index("held fast") :]
    assert "step 10/10" in after_note and after_note.rstrip().count("held fast") == 1


def test_facts_are_dropped_from_the_end():
    facts = ["step 1/2", "loss 3", "ETA 1 s"]
    assert [facts_that_fit(facts, columns) for columns in (7, 8, 16, 17, 27)] == [
        "",
        "step 1/2",
        "step 1/2",
        "step 1/2 · loss 3",
        "step 1/2 · loss 3 · ETA 1 s",
    ]


def test_a_step_without_a_finite_loss_is_shown_and_does_not_hide_the_next_ones():
    out, clock = io.StringIO(), Clock()
    console = Console(4, screen=Screen(file=out, width=40), clock=clock)
    for step, loss in enumerate([2.0, float("nan"), 3.0, 3.0], start=1):
        clock.now_s += 60
        console.step(report(step, loss=loss))
    console.close()
    assert re.findall(r"loss (\S+)", out.getvalue()) == ["2.000", "nan", "3.000", "3.000"]


def test_a_step_above_the_peak_says_so_beside_its_figure():
    out = io.StringIO()
    console = Console(2, screen=Screen(file=out, width=40), clock=Clock())
    console.step(report(1, mfu=1.13))
    console.step(report(2, mfu=1.0))
    assert "MFU 113% (more than the peak)\n" in out.getvalue() and out.getvalue().endswith("MFU 100%\n")
