"""A run's steps for people: a progress bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from math import isfinite
from statistics import mean, median_low
from threading import Lock

from rich.console import Console as Screen
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column

from plait.report.metrics import EvalReport, StepReport
from plait.report.plausibility import mfu_text
from plait.screen.screen import wrapped
from plait.screen.ticker import TICK_S, ticking
from plait.units import format_count, format_duration

LINE_EVERY_S = 9.0
"""Seconds between lines of a log, which is looked at each second: so it is silent for ten seconds at most."""
LATER_LINE_EVERY_S, LATER_S = 30.0, 1800.0
"""Seconds between lines of a log after its first half hour, which somebody may be watching."""
LINE_EVERY_SHARE = 0.05
SPINNER, MOVES_PER_S = "line", 1.0
"""The ASCII spinner on a terminal, for when nothing else moves."""
REFRESH_EVERY_S = 0.1
BAR_FROM_COLUMNS = 100
FACT_COLUMNS = (len("loss 12.345"), len("ETA 59 min 59 s"), len("12.3K tokens/s"))


class Console:
    """A sink for people; `steps_done` is where this start goes on from, out of `total_steps`.

    On a terminal it draws one line in place, which moves also during long steps, and prints notes above it. Elsewhere
    it prints a line each 10 seconds, after half an hour each 30, and each 5 % of the steps, whichever comes first;
    where no step ended for that long, a line says so.
    """

    def __init__(
        self,
        total_steps: int,
        steps_done: int = 0,
        *,
        screen: Screen | None = None,
        clock: Callable[[], float] = time.monotonic,
        tick_s: float = TICK_S,
    ) -> None:
        self._total = total_steps
        self._screen = screen or Screen(highlight=False)
        self._clock = clock
        self._recent = RecentSteps()
        self._last_printed_s = self._last_step_s = self._began_s = clock()
        self._last_printed_step = self._last_step = steps_done
        self._progress = _progress(self._screen) if self._screen.is_terminal else None
        self._lock, self._looking = Lock(), ExitStack()
        if self._progress is None:
            self._looking.enter_context(ticking(self._say_what_goes_on, tick_s))
        if self._progress is not None:
            self._task = self._progress.add_task("", total=total_steps, completed=steps_done, facts="starting")
            self._progress.start()

    def step(self, report: StepReport) -> None:
        with self._lock:
            self._recent.add(report)
            self._last_step, self._last_step_s = report.step, self._clock()
            if self._progress is not None:
                facts = facts_that_fit(self._facts(report), facts_width(self._screen.width))
                self._progress.update(self._task, completed=report.step, facts=facts)
                if self._due(report.step, REFRESH_EVERY_S, share=1.0):
                    self._progress.refresh()
            elif self._due(report.step, self._line_every_s, LINE_EVERY_SHARE):
                self._print(aligned_facts(self._facts(report), self._total))

    def evaluation(self, report: EvalReport) -> None:
        per_byte = "" if report.eval_nats_per_byte is None else f"{report.eval_nats_per_byte:.3g} nats per byte"
        if report.pair_accuracy is not None and report.reward_margin is not None:
            per_byte = f"a pair; {report.pair_accuracy:.1%} ranked right, margin {report.reward_margin:.3g}"
        right = "" if report.choices_accuracy is None else f", {report.choices_accuracy:.1%} of choices right"
        self._print(f"step {report.step}: held-out loss {report.eval_loss:.3f} ({per_byte}){right}")

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        """Leave the last state of the bar on the screen; a second call does nothing."""
        self._looking.close()
        if self._progress is not None:
            self._progress.stop()

    @property
    def _line_every_s(self) -> float:
        return LINE_EVERY_S if self._clock() - self._began_s < LATER_S else LATER_LINE_EVERY_S

    def _say_what_goes_on(self) -> None:
        with self._lock:
            if self._clock() - self._last_printed_s < self._line_every_s:
                return
            self._last_printed_s = self._clock()
            last = self._last_step >= self._total
            what = "the held-out loss and the last checkpoint" if last else f"step {self._last_step + 1}/{self._total}"
            self._print(f"working  {what}, {format_duration(round(self._clock() - self._last_step_s))} so far")

    def _print(self, text: str) -> None:
        columns = self._screen.width if self._screen.is_terminal else None
        self._screen.print(wrapped(text, columns), markup=False, highlight=False, soft_wrap=True)

    def _due(self, step: int, every_s: float, share: float) -> bool:
        """Whether to print this step: enough time or enough steps went by, or it is the last one."""
        now, every_steps = self._clock(), max(1.0, share * self._total)
        crossed = step // every_steps > self._last_printed_step // every_steps
        due = crossed or now - self._last_printed_s >= every_s or step == self._total
        if due:
            self._last_printed_s, self._last_printed_step = now, step
        return due

    def _facts(self, report: StepReport) -> list[str]:
        """Facts about a step, the most important first: a narrow screen shows only those that fit."""
        left_s = (self._total - report.step) * self._recent.step_s
        facts = [
            f"step {report.step}/{self._total}",
            f"loss {self._recent.loss:.3f}",
            f"ETA {format_duration(round(left_s))}",
            f"{format_count(self._recent.tokens_per_s)} tokens/s",
        ]
        facts += [] if report.mfu is None else [f"MFU {mfu_text(report.mfu)}"]
        facts += [] if report.pair_accuracy is None else [f"{report.pair_accuracy:.0%} ranked right"]
        load = report.expert_load_max
        return facts if load is None else [*facts, f"busiest expert {load:.2f} × the mean"]


def aligned_facts(facts: list[str], total_steps: int) -> str:
    """The facts of a step in a line whose columns stand below those of the lines before."""
    widths = (len(f"step {total_steps}/{total_steps}"), *FACT_COLUMNS, len("MFU 12.3%"), 0)
    padded = [fact.ljust(width) for fact, width in zip(facts, widths, strict=False)]
    return " · ".join(padded).rstrip()


def facts_width(columns: int) -> int:
    """How many of a screen's columns the facts get beside what moves; from BAR_FROM_COLUMNS on the bar takes its
    share."""
    return columns - 2 if columns < BAR_FROM_COLUMNS else columns - BAR_FROM_COLUMNS // 5 - 3


def facts_that_fit(facts: list[str], columns: int) -> str:
    """The first facts, as many as fit on a line of `columns` characters."""
    line = ""
    for fact in facts:
        longer = f"{line} · {fact}" if line else fact
        if len(longer) > columns:
            break
        line = longer
    return line


def _progress(screen: Screen) -> Progress:
    facts = TextColumn("{task.fields[facts]}", markup=False)
    bar = BarColumn(bar_width=None, table_column=Column(ratio=1))
    columns = (bar, facts) if screen.width >= BAR_FROM_COLUMNS else (facts,)
    return Progress(SpinnerColumn(SPINNER), *columns, console=screen, expand=True, refresh_per_second=MOVES_PER_S)


# Figures of the last steps of a run, for the lines and bars that people watch.


SMOOTHING_STEPS = 20


class RecentSteps:
    """Running figures of about the last SMOOTHING_STEPS steps, right from the first step on: the loss is a mean; the
    time of a step a median, as the steps that are compiled take hundreds of times as long and come once."""

    def __init__(self) -> None:
        self._loss_weight = self._loss = 0.0
        self._taken = deque[tuple[float, float]](maxlen=SMOOTHING_STEPS)
        """Seconds and tokens of each step."""

    def add(self, report: StepReport) -> None:
        # A step without a finite loss is shown, and its neighbours are not lost with it.
        decay = 1 - 1 / SMOOTHING_STEPS if isfinite(self._loss) and isfinite(report.loss) else 0.0
        earlier = self._loss if decay else 0.0
        self._loss_weight = self._loss_weight * decay + 1
        self._loss = earlier * decay + report.loss
        self._taken.append((report.step_s, report.tokens_per_s * report.step_s))

    @property
    def loss(self) -> float:
        return self._loss / self._loss_weight

    @property
    def step_s(self) -> float:
        return median_low(seconds for seconds, _ in self._taken)

    @property
    def tokens_per_s(self) -> float:
        return mean(tokens for _, tokens in self._taken) / self.step_s if self.step_s else 0.0


# A small curve in one line of text.


BLOCKS, ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
"""Eight levels, the lowest first."""


def sparkline(values: Sequence[float], columns: int, encoding: str) -> str:
    """The means of up to `columns` equal parts of the values, as one character each; what is not finite is left out.

    Blocks where the encoding has them, else ASCII. Empty for fewer than two values.
    """
    finite = [value for value in values if isfinite(value)]
    if len(finite) < 2:
        return ""
    parts = min(columns, len(finite))
    edges = [part * len(finite) // parts for part in range(parts + 1)]
    means = [mean(finite[first:end]) for first, end in pairwise(edges)]
    levels, low, high = _levels_of(encoding), min(means), max(means)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((value - low) * scale)] for value in means)


def _levels_of(encoding: str) -> str:
    try:
        BLOCKS.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII_LEVELS
    return BLOCKS
