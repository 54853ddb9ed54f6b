"""A step as the plan means it: the schedule's own list, ending when the forecast does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from plait.layout import Layout
from plait.partition.pipeline_schedule import schedule_actions
from plait.planner.calibration.factors import StepItems
from plait.planner.plan import Forecast, HostShare, Plan
from plait.planner.report.planned_timeline import planned_timeline
from plait.report.step_timeline import RankTimeline, totals_of
from tests.plans import changed
from tests.run_files.written_runs import usual_recipe_and_plan

ITEMS = StepItems(compute_s=0.6, messages_s=0.1, optimizer_s=0.05, within_s=0.05, bubble_s=0.2)


@cache
def plan_of(layout: Layout, items: StepItems | None = ITEMS, **values: Any) -> Plan:
    plan = usual_recipe_and_plan()[1]
    forecast = Forecast(
        step_s=1.0, tensor_bytes=1.0, bytes_per_device=1.0, one_device_step_s=None, error=0.1, items=items,
        embedding_cost_in_layers=0.1, head_cost_in_layers=1.5,
    )  # fmt: skip
    return changed(replace(plan, forecast=forecast), layout=layout, batch_sequences=8, micro_sequences=1, **values)


def work(own: RankTimeline) -> list[tuple[Any, ...]]:
    return [(span.kind, span.stage, span.micro) for span in own.spans if span.lane == "work" and span.stage >= 0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "interleaved"])
def test_a_pipelines_plan_is_the_list_that_its_ranks_carry_out(schedule: Any) -> None:
    stages = (2, 2, 2, 2, 2, 2, 2, 2) if schedule == "interleaved" else (4, 4, 4, 4)
    planned = planned_timeline(plan_of(Layout(pipeline=4, stage_layers=stages, schedule=schedule)), 5, 2)
    assert planned is not None and planned.steps == range(5, 7)
    lists = schedule_actions(schedule, ranks=4, virtual=len(stages) // 4, micros=8)
    for own, actions in zip(planned.ranks, lists, strict=True):
        first = [span for span in own.spans if span.step == 5]
        assert work(replace(own, spans=tuple(first))) == [tuple(action) for action in actions]
        assert max(span.end_s for span in first) == pytest.approx(ITEMS.step_s)
        assert max(span.end_s for span in own.spans) == pytest.approx(2 * ITEMS.step_s)
        waits_s = [span.seconds for span in first if span.lane == "wait"]
        assert sum(waits_s) > 0


@pytest.mark.parametrize(
    "layout", [Layout(replicate=2), Layout(shard=2, shard_what="parameters"), Layout(tensor=2), Layout(context=2)]
)
def test_without_a_pipeline_micro_batches_follow_each_other(layout: Layout) -> None:
    planned = planned_timeline(plan_of(layout), 1, 1)
    assert planned is not None
    micros = 8 // layout.data_parallel_degree
    for place in range(2):
        totals = totals_of(planned, place)
        assert totals["work", "forward"].events == totals["work", "backward"].events == micros
        assert totals["work", "update"].seconds == pytest.approx(ITEMS.optimizer_s)
        waits_s = sum(found.seconds for (lane, _), found in totals.items() if lane == "wait")
        assert waits_s == pytest.approx(ITEMS.messages_s + ITEMS.within_s)
        assert sum(found.seconds for (lane, _), found in totals.items() if lane != "message") == pytest.approx(1.0)


def test_stages_of_unlike_machines_take_as_long() -> None:
    hosts = tuple(HostShare(name=name, workers=1, threads=2, machine=name) for name in "ab")
    layout, micros = Layout(pipeline=2, stage_layers=(9, 3)), 8
    planned = planned_timeline(plan_of(layout, hosts=hosts), 1, 1)
    assert planned is not None
    for place in range(2):
        totals = totals_of(planned, place)
        passes_s = totals["work", "forward"].seconds + totals["work", "backward"].seconds
        assert passes_s == pytest.approx(ITEMS.compute_s + ITEMS.within_s), micros
    alike = planned_timeline(plan_of(layout), 1, 1)
    assert alike is not None
    assert totals_of(alike, 0)["work", "forward"].seconds > 1.8 * totals_of(alike, 1)["work", "forward"].seconds


def test_unequal_shares_have_their_own_micro_batches() -> None:
    planned = planned_timeline(plan_of(Layout(replicate=2), shares=(6, 2)), 1, 1)
    assert planned is not None
    assert [totals_of(planned, place)["work", "forward"].events for place in range(2)] == [6, 2]
    ends = [max(span.end_s for span in own.spans if span.kind == "backward") for own in planned.ranks]
    assert ends[0] == pytest.approx(ends[1])


def test_a_plan_without_items_has_no_timeline() -> None:
    assert planned_timeline(plan_of(Layout(), None), 1, 1) is None
    assert planned_timeline(replace(plan_of(Layout()), forecast=None), 1, 1) is None
