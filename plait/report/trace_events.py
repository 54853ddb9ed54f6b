"""Timelines as JSON in Chrome's trace-event format, which ui.perfetto.dev and chrome:

tracing open.

Each rank is a process of the trace, and each of its lanes a thread, the planned ones above the measured ones. Complete
events (ph "X") on one thread must be nested or disjoint, so overlapping messages get separate lanes. Arrows (ph "s" and
"f") lead from a stage's pass to the pass that waits for its result. Times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plait.report.step_timeline import Lane, RankTimeline, StepTimeline, TimelineSpan

_LANE_TEXTS: Mapping[str, str] = {"planned": "as planned", "measured": "as it was"}
_LANES_APART = 100
"""The distance between the thread numbers of two sources."""
_MOST_LANES = 45
"""The most lanes of messages; more are never under way at once."""
_ROUNDING_S = 1e-9


def trace_json(timelines: Sequence[StepTimeline]) -> str:
    """The whole file. `timelines` belong to one run, the plan's first."""
    events = [event for number, one in enumerate(timelines) for event in _events_of(one, number)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))


def _events_of(timeline: StepTimeline, number: int) -> Iterator[dict[str, Any]]:
    source = _LANE_TEXTS[timeline.source]
    for own in timeline.ranks:
        name = f"rank {own.rank}" + (f" on {own.host}" if own.host else "")
        yield _metadata("process_name", own.rank, 0, name=name)
        yield _metadata("process_sort_index", own.rank, 0, sort_index=own.rank)
        for place, (text, spans) in enumerate(_lanes(own)):
            thread = 1 + number * _LANES_APART + place
            yield _metadata("thread_name", own.rank, thread, name=f"{text}, {source}")
            yield _metadata("thread_sort_index", own.rank, thread, sort_index=thread)
            for span in spans:
                yield _complete(span, own.rank, thread, timeline.source)
    yield from _arrows(timeline, 1 + number * _LANES_APART)


def _lanes(own: RankTimeline) -> Iterator[tuple[str, Sequence[TimelineSpan]]]:
    """The names of a rank's threads and their spans: its work with its waits, then messages."""
    work, beside = _nested([span for span in own.spans if span.lane != "message"])
    yield "work", work
    groups = (("waits", beside), ("messages", [span for span in own.spans if span.lane == "message"]))
    for name, spans in groups:
        lanes = _lanes_apart(spans)
        for number, lane in enumerate(lanes):
            yield (name if len(lanes) == 1 else f"{name} {number + 1}"), lane


def _lanes_apart(spans: Sequence[TimelineSpan]) -> list[list[TimelineSpan]]:
    """The spans in as few lanes as possible, without overlaps."""
    lanes: list[list[TimelineSpan]] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        free = next((lane for lane in lanes if lane[-1].end_s <= span.start_s), None)
        if free is None and len(lanes) < _MOST_LANES:
            lanes.append([span])
        elif free is not None:
            free.append(span)
    return lanes


def _nested(spans: Sequence[TimelineSpan]) -> tuple[list[TimelineSpan], list[TimelineSpan]]:
    """Spans of one thread, each before the spans inside it; and spans that cross another one's end, as when a second
    stream of a GPU waits."""
    order: Mapping[Lane, int] = {"work": 0, "wait": 1, "message": 2}
    inside, across, open_spans = list[TimelineSpan](), list[TimelineSpan](), list[TimelineSpan]()
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s, order[span.lane])):
        while open_spans and open_spans[-1].end_s <= span.start_s + _ROUNDING_S:
            open_spans.pop()
        if open_spans and span.end_s > open_spans[-1].end_s + _ROUNDING_S:
            across.append(span)
            continue
        open_spans.append(span)
        inside.append(span)
    return inside, across


def _metadata(what: str, rank: int, thread: int, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "ts": 0, "args": values}


def _complete(span: TimelineSpan, rank: int, thread: int, source: str) -> dict[str, Any]:
    known = {"step": span.step, "stage": span.stage + 1, "micro": span.micro + 1, "bytes": span.n_bytes}
    return {
        "ph": "X",
        "name": span.name,
        "cat": f"{source},{span.lane}",
        "pid": rank,
        "tid": thread,
        "ts": _microseconds(span.start_s),
        # The end is rounded, and not the length: spans that touch must not overlap.
        "dur": _microseconds(span.end_s) - _microseconds(span.start_s),
        "args": {key: value for key, value in known.items() if value > 0},
    }


def _arrows(timeline: StepTimeline, thread: int) -> Iterator[dict[str, Any]]:
    """Arrows from each pass whose result goes to another rank to the pass that takes it."""
    passes = {
        (span.step, span.kind, span.stage, span.micro): (own.rank, span)
        for own in timeline.ranks
        for span in own.spans
        if span.lane == "work" and span.stage >= 0
    }
    for number, ((step, kind, stage, micro), (rank, span)) in enumerate(passes.items()):
        following = stage + 1 if kind == "forward" else stage - 1
        taken = passes.get((step, kind, following, micro)) if kind != "backward-weight" else None
        if taken is None or taken[0] == rank:
            continue
        flow = {"name": "result", "cat": f"{timeline.source},message", "id": thread * 10_000_000 + number}
        # Each end binds to the span that it lies in, and an arrow must not point back: a receiver may be done before
        # its sender, which sends within a pass, comes to the end of that.
        left_s = max(span.start_s, min(span.end_s - 1e-7, taken[1].end_s))
        arrives_s = min(max(left_s, taken[1].start_s), taken[1].end_s)
        yield {"ph": "s", **flow, "pid": rank, "tid": thread, "ts": _microseconds(left_s)}
        yield {"ph": "f", "bp": "e", **flow, "pid": taken[0], "tid": thread, "ts": _microseconds(arrives_s)}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
