"""Recording steps: it sees what each layout does, changes no number, and leaves nothing behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.launch.values.job import Job, Message
from plait.layout import Layout
from plait.parallel.watched import WATCH
from plait.planner.plan_file import read_plan
from plait.planner.report.planned_timeline import planned_timeline
from plait.report.step_timeline import RankTimeline, StepTimeline, timeline_from_json
from plait.report.timeline_request import TimelineFiles
from plait.report.trace_events import trace_json
from plait.trainer.recording.live import LiveTimeline
from plait.trainer.recording.recorder import StepRecorder
from tests.report.trace_rules import check_trace
from tests.shared_ranks import RanksOf
from tests.trainer.tiny import make_tiny

STEPS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "copies": {"replicate": 2},
    "unequal shares": {"replicate": 2},
    "sharded optimizer": {"shard": 2},
    "sharded parameters": {"shard": 2, "shard_what": "parameters"},
    "tensor": {"tensor": 2},
    "context": {"context": 2},
    "gpipe": {"pipeline": 2, "stage_layers": [2, 2], "schedule": "gpipe"},
    "1f1b": {"pipeline": 2, "stage_layers": [2, 2]},
    "zero-bubble": {"pipeline": 2, "stage_layers": [2, 2], "schedule": "zero-bubble"},
    "interleaved": {"pipeline": 2, "stage_layers": [1, 1, 1, 1], "schedule": "interleaved"},
}
MESSAGES = {
    "copies": {"gradient sum"},
    "unequal shares": {"gradient sum"},
    "sharded optimizer": {"gradient sum", "weights"},
    "sharded parameters": {"gradient sum", "weights"},
    "tensor": {"tensor rows"},
    "context": {"keys and values", "gradient sum"},
    "gpipe": {"stage message"},
    "1f1b": {"stage message"},
    "zero-bubble": {"stage message"},
    "interleaved": {"stage message"},
}
PIPELINES = ("gpipe", "1f1b", "zero-bubble", "interleaved")
UNEQUAL = (12, 4)


class Recorded:
    """What ranks told of one layout, and the timeline that they made."""

    def __init__(self, folder: Path, number: int, told: dict[int, dict[str, Any]]) -> None:
        self.told = told
        self.timeline = timeline_from_json((folder / f"timeline-{number}.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("timeline")
    make_tiny(made, "train.batch_tokens=128", "model.layers=4", "layout.micro_sequences=4")
    return made


@pytest.fixture(scope="module")
def recorded(folder: Path) -> dict[str, Recorded]:
    told: dict[str, dict[int, dict[str, Any]]] = {}

    def hear(message: Message) -> None:
        told.setdefault(message.kind, {})[message.rank] = dict(message.values)

    unequal = {str(list(LAYOUTS).index("unequal shares")): UNEQUAL}
    asked = {"folder": str(folder), "cases": list(LAYOUTS.values()), "shares": unequal, "steps": STEPS}
    job = Job(entry="record_layouts", argument=json.dumps(asked), world_size=2, threads=1)
    RanksOf("tests.trainer.timeline_entries").run(job, on_message=hear)
    return {name: Recorded(folder, number, told[f"case {number}"]) for number, name in enumerate(LAYOUTS)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recording_changes_no_number_and_leaves_nothing_behind(recorded: dict[str, Recorded], layout: str) -> None:
    for told in recorded[layout].told.values():
        assert told["losses"] == told["recorded"] and len(told["losses"]) == STEPS
        assert told["hooks"][0] == told["hooks"][1]
        assert told["is_off"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_shows_what_it_does_and_sends(recorded: dict[str, Recorded], layout: str) -> None:
    timeline = recorded[layout].timeline
    assert timeline.steps == range(1, STEPS + 1) and [own.rank for own in timeline.ranks] == [0, 1]
    for own in timeline.ranks:
        for step in timeline.steps:
            spans = [span for span in own.spans if span.step == step]
            work = [span.kind for span in spans if span.lane == "work"]
            assert work[0] == "data" and work[-2:] == ["gradients", "update"]
            begin_s, end_s = timeline.bounds_s[step - 1]
            assert all(begin_s - 1e-6 <= span.start_s <= span.end_s for span in spans)
            assert all(span.end_s <= end_s + 1e-6 for span in spans if span.lane != "message")
        assert {span.kind for span in own.spans if span.lane == "message"} >= MESSAGES[layout]
    check_trace(json.loads(trace_json([timeline])))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_and_the_ranks_pass_through_the_same_list(
    recorded: dict[str, Recorded], folder: Path, layout: str
) -> None:
    plan = read_plan(folder / "plan.json")
    case: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in LAYOUTS[layout].items()}
    shares = UNEQUAL if layout == "unequal shares" else ()
    plan = replace(plan, placement=replace(plan.placement, layout=Layout(**case), shares=shares))
    assert plan.forecast is not None and plan.forecast.items is not None
    if layout in PIPELINES:  # what a forecast of a pipeline has
        items = replace(plan.forecast.items, bubble_s=plan.forecast.items.compute_s / 2)
        plan = replace(plan, forecast=replace(plan.forecast, items=items))
    planned = planned_timeline(plan, 1, STEPS)
    assert planned is not None
    for before, after in zip(planned.ranks, recorded[layout].timeline.ranks, strict=True):
        assert passes(before) == passes(after) and len(passes(after)) >= 2 * STEPS
        if layout in PIPELINES:
            sent = [[span.place for span in one.spans if span.kind == "stage message" and span.lane == "message"]
                    for one in (before, after)]  # fmt: skip
            assert sorted(sent[0]) == sorted(sent[1]) and sent[0]
    check_trace(json.loads(trace_json([planned, recorded[layout].timeline])))


def passes(own: RankTimeline) -> list[tuple[Any, ...]]:
    """Forwards and backwards of a rank in their order."""
    kinds = ("forward", "backward", "backward-input", "backward-weight")
    return [(span.step, *span.place) for span in own.spans if span.lane == "work" and span.kind in kinds]


def test_tokens_on_their_way_to_experts_are_seen(tmp_path: Path) -> None:
    make_tiny(tmp_path, "model.experts=4", "train.batch_tokens=64")
    told: dict[int, dict[str, Any]] = {}

    def hear(message: Message) -> None:
        told[message.rank] = dict(message.values)

    asked = {"folder": str(tmp_path), "cases": [{"replicate": 2, "expert": 2}], "shares": {}, "steps": 1}
    job = Job(entry="record_layouts", argument=json.dumps(asked), world_size=2, threads=1)
    RanksOf("tests.trainer.timeline_entries").run(job, on_message=hear)
    found = Recorded(tmp_path, 0, told)
    assert all(one["losses"] == one["recorded"] for one in told.values())
    for own in found.timeline.ranks:
        kinds = [span.kind for span in own.spans if span.lane == "message"]
        assert {"expert tokens", "counts", "gradient sum"} <= set(kinds)
        sent = [span.n_bytes for span in own.spans if span.kind == "expert tokens" and span.lane == "message"]
        assert len(sent) % 4 == 0 and max(sent) > 0  # there and back, forward and backward
    check_trace(json.loads(trace_json([found.timeline])))


def test_clocks_of_machines_are_compared(folder: Path) -> None:
    told: dict[int, dict[str, Any]] = {}
    ahead_s = 1234.5
    job = Job(
        entry="compare_clocks",
        argument=json.dumps({"folder": str(folder), "ahead_s": ahead_s}),
        world_size=2,
        threads=1,
    )

    def hear(message: Message) -> None:
        told[message.rank] = dict(message.values)

    RanksOf("tests.trainer.timeline_entries").run(job, on_message=hear)
    assert told[0] == told[1]
    assert told[0]["same"] == [{"offset_s": 0.0, "error_s": 0.0}] * 2
    first, second = told[0]["apart"]
    assert first == {"offset_s": 0.0, "error_s": 0.0}
    assert 0 < second["error_s"] < 1
    assert abs(second["offset_s"] - ahead_s) <= second["error_s"]


def test_nobody_pays_while_nobody_records() -> None:
    values = torch.zeros(3)
    contexts = {id(one) for one in (WATCH.work("forward"), WATCH.wait("weights"), WATCH.exchange("counts", values))}
    assert len(contexts) == 1 and WATCH.begin("gradient sum", values) is None


def test_other_threads_are_not_recorded() -> None:
    from concurrent.futures import ThreadPoolExecutor

    recorder = StepRecorder(torch.device("cpu"))

    def save() -> None:
        with WATCH.work("update"):
            pass

    with recorder.step(1), ThreadPoolExecutor(1) as pool:
        pool.submit(save).result()
        with WATCH.work("forward", micro=0), WATCH.exchange("counts", torch.zeros(2)):
            pass
    [(step, _, _)], spans = recorder.read()
    assert step == 1
    assert [(span.lane, span.kind, span.n_bytes) for span in spans if span.lane != "message"] == [
        ("work", "forward", 0),
        ("wait", "counts", 0),
    ]
    assert [(span.kind, span.n_bytes) for span in spans if span.lane == "message"] == [("counts", 8)]


def test_a_run_that_trains_is_asked_in_its_folder(tmp_path: Path) -> None:
    files, now = TimelineFiles(tmp_path), [0.0]
    assembly: Any = SimpleNamespace(
        sums=SimpleNamespace(index=0, size=1, gather=lambda values: [values]), device=torch.device("cpu")
    )
    live = LiveTimeline(assembly, tmp_path, lambda: now[0])
    state: Any = SimpleNamespace(step=6)
    files.ask(2)
    assert live.requested() == 0  # it looks once a second
    now[0] = 2.0
    assert live.requested() == 2
    live.agreed(2)
    for step in (6, 7):
        state.step = step
        assert WATCH.recorder is None
        live.observer.before_step(state)
        with WATCH.work("forward", micro=0):
            pass
        live.observer.after_step(state)
    timeline = timeline_from_json(files.answer.read_text())
    assert timeline.steps == range(7, 9) and not files.request.exists()
    assert [span.step for span in timeline.ranks[0].spans] == [7, 8]
    now[0] = 9.0
    assert live.requested() == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"steps": "3"}', '{"steps": -1}', "\x00" * 5000])
def test_a_request_that_says_nothing_is_none(tmp_path: Path, text: str) -> None:
    files = TimelineFiles(tmp_path)
    files.request.write_text(text)
    assert files.requested_steps() == 0


def test_a_damaged_timeline_is_refused() -> None:
    with pytest.raises(ValueError):
        timeline_from_json('{"source": "measured"}')
    with pytest.raises(ValueError):
        StepTimeline(source="measured", first_step=1, bounds_s=(), ranks=())
