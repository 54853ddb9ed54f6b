"""The page of a timeline: both lines of each rank, the table by kind, and nothing that a browser would run."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

from plait.report.step_timeline import RankTimeline, StepTimeline, TimelineSpan, with_stage_messages
from plait.run_files.timeline_page import TimelinePage, headline, timeline_html
from tests.report.test_report_step_timeline import PIPED, span, timeline

MEASURED = with_stage_messages(PIPED)
PLANNED = replace(MEASURED, source="planned", bounds_s=((0.0, 5.0),))
PAGE = TimelinePage(
    run="<first>", layout="pipeline (PP) 2", measured=MEASURED, planned=PLANNED, recorded="Recorded & saved nothing."
)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        if tag not in ("meta", "input", "link", "br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_runs_nothing() -> None:
    text = timeline_html(PAGE)
    tags = _Tags()
    tags.feed(text)
    assert not tags.open and not tags.names & {"script", "link", "img", "iframe"}
    assert "&lt;first&gt;" in text and "<first>" not in text and "http" not in text.replace("http-equiv", "")


def test_each_rank_has_its_plan_above_what_it_was() -> None:
    text = timeline_html(PAGE)
    lanes = re.findall(r'class="bars lane (\w+)"', text)
    assert lanes == ["planned", "thin", "measured", "thin"] * 2
    assert "forward 1, stage 1: 1 s, 0 s to 1 s" in text.replace("0 ms", "0 s")


def test_the_table_compares_planned_and_measured_by_kind() -> None:
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", timeline_html(PAGE))]
    kinds = {row[0]: row[1:] for row in rows}
    assert kinds["forward"] == ["1 s", "1 s", "+0 s", "1", "1"]
    assert kinds["under way: message between stages"][0] == "1 s"


def test_the_headline_names_the_largest_difference() -> None:
    assert headline(PAGE).startswith("A step took 6 s, 1.2 times as long as planned (5 s).") or "20" in headline(PAGE)
    slower = timeline([span("work", "forward", 0.0, 9.0, micro=0)])
    faster = replace(timeline([span("work", "forward", 0.0, 3.0, micro=0)]), source="planned")
    text = headline(replace(PAGE, measured=slower, planned=faster))
    assert "On rank 0, which works most, the largest difference is forward: 9 s a step, and 3 s in the plan." in text
    assert headline(replace(PAGE, planned=None)).endswith("no forecast to compare it with.")
    assert "no forecast" in timeline_html(replace(PAGE, planned=None))


def test_thousands_of_narrow_waits_are_drawn_as_few_bars() -> None:
    waits = [
        TimelineSpan(lane="wait", kind="tensor rows", step=1, start_s=1 + k * 1e-4, end_s=1 + k * 1e-4 + 5e-5)
        for k in range(5000)
    ]
    many = StepTimeline(
        source="measured", first_step=1, bounds_s=((0.0, 10.0),), ranks=(RankTimeline(rank=0, spans=tuple(waits)),)
    )
    text = timeline_html(replace(PAGE, measured=many, planned=None))
    assert text.count("<i style=") < 30 and "5000 × waiting: rows between tensor ranks" in text
    assert "4,750 more events are in the trace" in text
