"""Timelines as values: what each second went into, which message belongs to which pass, and the trace's lanes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.report.step_timeline import (
    RankTimeline,
    StepTimeline,
    TimelineSpan,
    busiest_rank,
    own_seconds,
    timeline_from_json,
    totals_of,
    with_stage_messages,
)
from plait.report.trace_events import trace_json
from tests.report.trace_rules import check_trace


def span(lane: Any, kind: Any, start_s: float, end_s: float, **values: Any) -> TimelineSpan:
    return TimelineSpan(lane=lane, kind=kind, step=1, start_s=start_s, end_s=end_s, **values)


def timeline(*ranks: list[TimelineSpan]) -> StepTimeline:
    made = tuple(RankTimeline(rank=rank, spans=tuple(spans)) for rank, spans in enumerate(ranks))
    end_s = max(one.end_s for spans in ranks for one in spans)
    return StepTimeline(source="measured", first_step=1, bounds_s=((0.0, end_s),), ranks=made)


PIPED = timeline(
    [
        span("work", "forward", 0.0, 1.0, stage=0, micro=0),
        span("work", "backward", 1.0, 6.0, stage=0, micro=0),
        span("wait", "stage message", 1.0, 5.0),
    ],
    [
        span("work", "forward", 0.0, 2.5, stage=1, micro=0),
        span("wait", "stage message", 0.0, 1.5),
        span("work", "backward", 2.5, 4.0, stage=1, micro=0),
    ],
)


def test_work_is_counted_without_the_waits_in_it() -> None:
    own = {(one.lane, one.kind): seconds for one, seconds in own_seconds(PIPED.ranks[0].spans)}
    assert own == {("work", "forward"): 1.0, ("work", "backward"): 1.0, ("wait", "stage message"): 4.0}
    assert busiest_rank(PIPED) == 1  # 2.5 s of work; the first rank works for 2
    totals = totals_of(PIPED, 1)
    assert totals["work", "forward"].seconds == pytest.approx(1.0) and totals["work", "forward"].events == 1


def test_a_message_is_under_way_until_its_receiver_goes_on() -> None:
    found = with_stage_messages(PIPED)
    sent = [[one for one in own.spans if one.lane == "message"] for own in found.ranks]
    assert [(one.start_s, one.end_s, one.stage) for one in sent[0]] == [(1.0, 1.5, 0)]
    assert [(one.start_s, one.end_s, one.stage) for one in sent[1]] == [(4.0, 5.0, 1)]


def test_a_trace_has_a_lane_for_each_overlapping_message_and_an_arrow_for_each_result() -> None:
    crowded = timeline(
        [
            span("work", "gradients", 0.0, 4.0),
            *(span("message", "gradient sum", 0.5 * k, 2 + 0.6 * k) for k in range(3)),
        ]
    )
    names = [event["args"].get("name") for event in check(crowded) if event["ph"] == "M"]
    assert [name for name in names if name and name.startswith("messages")] == [
        f"messages {number}, as it was" for number in (1, 2, 3)
    ]
    events = check(with_stage_messages(PIPED))
    assert [event["ph"] for event in events if event["ph"] in "sf"] == ["s", "f"] * 2


def test_a_wait_across_the_end_of_a_pass_has_a_lane_of_its_own() -> None:
    beside = timeline([span("work", "backward", 0.0, 2.0, micro=0), span("wait", "gradient sum", 1.0, 3.0)])
    names = [event["args"].get("name") for event in check(beside) if event["name"] == "thread_name"]
    assert names == ["work, as it was", "waits, as it was"]


def check(*timelines: StepTimeline) -> list[dict[str, Any]]:
    trace = json.loads(trace_json(timelines))
    check_trace(trace)
    return trace["traceEvents"]


@pytest.mark.parametrize(
    "change",
    [
        lambda event: event.pop("pid"),
        lambda event: event.update(dur=-1.0),
        lambda event: event.update(ts="0"),
        lambda event: event.update(dur=3e6),
        lambda event: event.update(ph="Q"),
        lambda event: event.update(tid=77),
    ],
)
def test_the_rules_refuse_a_broken_trace(change: Any) -> None:
    trace = json.loads(trace_json([PIPED]))
    change(next(event for event in trace["traceEvents"] if event["ph"] == "X"))
    with pytest.raises((AssertionError, KeyError)):
        check_trace(trace)


def test_a_timeline_returns_from_json_as_it_was() -> None:
    assert timeline_from_json(PIPED.to_json()) == PIPED
