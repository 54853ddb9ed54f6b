"""The report as text for a terminal, in lines that are not wrapped yet."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from plait.planner.report.report import PlanReport
from plait.units import format_count, format_duration

TEXT_HEADINGS = {"listed": "compared", "binds": "limits", "changes": "what if", "sure": "accuracy"}
"""What a section is called here where it is not its title, which programs read."""


def report_lines(report: PlanReport) -> list[str]:
    """The whole answer, a line for each sentence."""
    lines = [
        f"plan     {report.model} on {report.machines}",
        f"batch    {report.batch}",
        *(f"         · {note}" for note in report.notes),
    ]
    for section in report.sections:
        heading = TEXT_HEADINGS.get(section.title, section.title)
        said = (*section.lines, *(f"· {point}" for point in section.points))
        lines += [f"{heading if first == 0 else '':8} {line}" for first, line in enumerate(said)]
    return lines


def comparison_table(reports: Sequence[PlanReport], columns: int) -> str:
    """Several clusters in a table of this many columns of text at most; a long layout goes on in the lines below it."""
    rows = [("cluster", "step", "tokens/s", "layout")]
    rows += [
        (one.cluster, format_duration(one.chosen.step_s), format_count(one.tokens_per_s), one.layout) for one in reports
    ]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    start = min(sum(wide) + 2 * len(wide), columns // 2)
    return "\n".join(
        fill(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, wide, strict=False)), row[3]]),
            columns,
            subsequent_indent=" " * start,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for row in rows
    )
