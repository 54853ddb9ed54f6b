"""The report as text for a terminal, in lines that are not wrapped yet."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from plait.planner.report.report import PlanReport, PlanSection, run_cost_text, run_time_text
from plait.units import format_count, format_duration

TEXT_HEADINGS = {"listed": "compared", "binds": "limits", "changes": "what if", "sure": "accuracy"}
"""Names of sections that differ from their titles, which programs read."""
PLANNED_FIRST = ("time", "memory", "money")
"""Sections that people plan by: they stand directly below the line that names model and machines."""


def summary_lines(report: PlanReport) -> list[str]:
    """The answer without its reasons, a line for each sentence: what `plait plan` prints unless asked for more."""
    return _lines(report, report.notes, report.summary)


def report_lines(report: PlanReport) -> list[str]:
    """The whole answer with all reasons, a line for each sentence."""
    return _lines(report, (*report.notes, *report.reasons), report.sections)


def _lines(report: PlanReport, notes: Sequence[str], sections: Sequence[PlanSection]) -> list[str]:
    first = [section for section in sections if section.title in PLANNED_FIRST]
    return [
        f"plan     {report.model} on {report.machines}",
        *(line for section in first for line in _section_lines(section)),
        f"batch    {report.batch}",
        *(f"         · {note}" for note in notes),
        *(line for section in sections if section not in first for line in _section_lines(section)),
    ]


def _section_lines(section: PlanSection) -> list[str]:
    heading = TEXT_HEADINGS.get(section.title, section.title)
    said = (*section.lines, *(f"· {point}" for point in section.points))
    return [f"{heading if first == 0 else '':8} {line}" for first, line in enumerate(said)]


def comparison_table(reports: Sequence[PlanReport], columns: int) -> str:
    """Several clusters in a table of this many columns of text at most; a long layout goes on in the lines below it."""
    rows = [("cluster", "time", "money", "step", "tokens/s", "layout")]
    rows += [
        (
            one.cluster,
            run_time_text(one.run),
            run_cost_text(one.run),
            format_duration(one.chosen.step_s),
            format_count(one.tokens_per_s),
            one.layout,
        )
        for one in reports
    ]
    return aligned_table(rows, columns)


def aligned_table(rows: Sequence[Sequence[str]], columns: int) -> str:
    """Rows of cells in lines of this many columns at most; the last cell goes on in the lines below it."""
    *narrow, _ = zip(*rows, strict=True)
    wide = [max(map(len, cells)) for cells in narrow]
    start = min(sum(wide) + 2 * len(wide), columns * 2 // 3)
    return "\n".join(
        fill(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, wide, strict=False)), row[-1]]),
            columns,
            subsequent_indent=" " * start,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for row in rows
    )
