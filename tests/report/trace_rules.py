"""The rules of Chrome's trace-event format that viewers need ("Trace Event Format", Google, the JSON object format)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name",
            "thread_sort_index": "sort_index"}  # fmt: skip


def check_trace(trace: dict[str, Any]) -> None:
    """Raise AssertionError where a trace breaks a rule."""
    assert trace["displayTimeUnit"] in ("ms", "ns") and isinstance(trace["traceEvents"], list)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    flows: dict[tuple[str, Any], list[dict[str, Any]]] = defaultdict(list)
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        match event["ph"]:
            case "M":
                assert METADATA[event["name"]] in event["args"]
                named.add((event["name"], event["pid"], event["tid"]))
            case "X":
                assert event["dur"] >= 0 and isinstance(event["cat"], str) and isinstance(event["args"], dict)
                threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "s" | "f":
                assert event["cat"] and "id" in event
                flows[event["cat"], event["id"]].append(event)
            case other:
                raise AssertionError(f"an event of kind {other}")
    assert threads, "a trace without events"
    for (process, thread), spans in threads.items():
        assert ("process_name", process, 0) in named and ("thread_name", process, thread) in named
        _check_nested(spans)
    for begin, end in flows.values():
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert begin["ts"] <= end["ts"] and begin["pid"] != end["pid"]
        for one in (begin, end):
            inside = threads[one["pid"], one["tid"]]
            assert any(start - 0.11 <= one["ts"] <= stop + 0.11 for start, stop in inside), "an arrow from nowhere"


def _check_nested(spans: list[tuple[float, float]]) -> None:
    """Complete events of a thread lie one inside the other or apart; those inside come later in the file."""
    open_spans: list[tuple[float, float]] = []
    for start, end in spans:
        while open_spans and open_spans[-1][1] <= start + 1e-6:
            open_spans.pop()
        if open_spans:
            outer_start, outer_end = open_spans[-1]
            assert outer_start <= start + 1e-6 and end <= outer_end + 0.11, (open_spans[-1], start, end)
        open_spans.append((start, end))
