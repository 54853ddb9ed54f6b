"""The runs of a folder as text: a table if the terminal is wide enough, else a few lines per run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime
from textwrap import TextWrapper

from plait.run_files.summary import RunSummary
from plait.units import counted, format_count

_TITLES = ("run", "state", "step", "loss", "tokens/s", "size", "changed")
_INDENT = "  "


def runs_text(runs: Sequence[RunSummary], *, now: datetime, columns: int | None) -> str:
    """All runs, each with the command that continues it. `columns` is the terminal's width; None: lines are not
    wrapped. Commands never are, so that they can be copied."""
    rows = [_TITLES, *(_cells(one, now) for one in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if columns is not None and sum(widths) + 2 * len(widths) - 2 > columns:
        return "\n".join(line for one in runs for line in _lines_of(one, now, columns))
    title, *aligned = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    pairs = zip(aligned, runs, strict=True)
    return "\n".join([title, *(line for row, one in pairs for line in (row, *_below(one, columns)))])


def _cells(run: RunSummary, now: datetime) -> tuple[str, ...]:
    return (
        run.name,
        run.state,
        _step_text(run),
        loss_text(run),
        "" if run.tokens_per_s is None else format_count(run.tokens_per_s),
        "" if run.parameters is None else format_count(run.parameters),
        age_text((now - run.updated).total_seconds()),
    )


def _lines_of(run: RunSummary, now: datetime, columns: int) -> Iterator[str]:
    _, state, step, loss, speed, size, changed = _cells(run, now)
    facts = (
        state,
        step and f"step {step}",
        loss and f"loss {loss}",
        speed and f"{speed} tokens/s",
        size and f"{size} parameters",
        changed,
    )
    yield run.name
    yield _indented(", ".join(filter(None, facts)), columns)
    yield from _below(run, columns)


def _below(run: RunSummary, columns: int | None) -> Iterator[str]:
    """The lines below a run's own: what is wrong with it, and the command that continues it."""
    if run.problem:
        yield _indented(run.problem, columns)
    if run.state == "not begun":
        yield _indented(f"nothing was trained; plait remove {shlex.quote(run.name)} deletes what is left", columns)
    if run.command:
        yield f"{_INDENT}{run.command}"


def _indented(text: str, columns: int | None) -> str:
    if columns is None:
        return f"{_INDENT}{text}"
    indent = TextWrapper(
        columns, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
    )
    return indent.fill(text)


def _step_text(run: RunSummary) -> str:
    if run.steps is None:
        return f"{run.step:,}" if run.step else ""
    saved = "" if run.step_saved in (None, run.step) else f" (saved: {run.step_saved:,})"
    return f"{run.step:,} of {run.steps:,}{saved}"


def loss_text(run: RunSummary) -> str:
    """1.48 per byte, 3.21 per token (last step); empty where no loss is known."""
    if run.loss is None or run.loss_unit is None:
        return ""
    last = " (last step)" if run.loss_text == "last step" else ""
    return f"{run.loss:.4g} {run.loss_unit.removeprefix('nats ')}{last}"


def age_text(seconds: float) -> str:
    """How long ago something was, in one unit: "now", "3 min ago", "12 days ago"."""
    if seconds < 2:
        return "now"
    for least_s, unit in ((60, "s"), (3600, "min"), (2 * 86400, "h")):
        if seconds < least_s:
            divisor = {"s": 1, "min": 60, "h": 3600}[unit]
            return f"{seconds / divisor:.0f} {unit} ago"
    return f"{counted(int(seconds / 86400), 'day', ',')} ago"
