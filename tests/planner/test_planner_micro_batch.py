"""How many sequences a processor takes at a time: what suits its caches, or more where gathering weights is dear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from plait.data.micro_sizes import micro_sizes
from plait.layout import Layout
from plait.planner.derive.resources import FixedWorkers, Resources
from plait.planner.plan import Plan
from plait.planner.resolve.constrained_search import fewer_gathers_reason, micro_sequences_to_try
from plait.planner.resolve.resolve import draft, settle
from tests.matrix import slow
from tests.planner.hosts import HOST, probed
from tests.planner.machines import PLAYS, recipe, without_reasons

FULLY = Layout(shard=4, shard_what="parameters")
SHARES = (50, 50, 20, 8)
WIDE, NARROW = 1e12, 3e7
"""Bytes a second."""
SIZE = ("model.layers=6", "model.width=192", "model.heads=6", "model.vocabulary=2048", "train.sequence=256")


def plan_of(folder: Path, *asked: str, speeds: Sequence[float] = (1.0, 1.0, 0.5, 0.25), rate: float = NARROW) -> Plan:
    """128 sequences split over hosts of such speeds."""
    cluster = probed(*speeds, rate=rate)
    given = FixedWorkers(workers=len(speeds), threads=1)
    resources = Resources(
        machine=HOST, peak_flops=None, fixed_workers=given, cluster=cluster, probe=lambda need: cluster
    )
    batch = ("train.batch_tokens=32768", 'train.budget="40 steps"')
    config = recipe(folder, *SIZE, *batch, f"layout.shard={len(speeds)}", *asked)
    outline = draft(config, replace(PLAYS, vocabulary=2048), resources, recipe_hash="")
    return settle(config, outline, without_reasons(outline.layouts))


def gatherings(plan: Plan) -> int:
    """Micro-batches of a step, which all of a plan's parts meet in."""
    limits = plan.placement.micro_limits or (plan.placement.micro_sequences,) * len(plan.sequences_per_replica)
    return max(len(sizes) for sizes in micro_sizes(plan.sequences_per_replica, limits))


def test_larger_micro_batches_are_priced_where_weights_are_gathered_for_each() -> None:
    assert list(micro_sequences_to_try(16, FULLY, SHARES, may_grow=False)) == [16, 25, 50]
    # Room for a share that grows by a quarter, so that it does not bring one more gathering.
    assert list(micro_sequences_to_try(16, FULLY, SHARES, may_grow=True)) == [16, 25, 63]
    whole = replace(FULLY, shard_what="optimizer"), Layout(replicate=4), replace(FULLY, pipeline=2)
    assert all(list(micro_sequences_to_try(16, layout, SHARES, may_grow=True)) == [16] for layout in whole)


@pytest.mark.parametrize("speeds", [slow(((1.0, 1.0, 0.5, 0.25),)), (1.0, 0.4), slow(((1.0, 1.0),))])
def test_over_a_narrow_road_weights_are_gathered_less_often(tmp_path: Path, speeds: Sequence[float]) -> None:
    usual, few = (
        plan_of(tmp_path, 'layout.shard_what="parameters"', speeds=speeds, rate=rate) for rate in (WIDE, NARROW)
    )
    assert (
        usual.placement.micro_sequences <= 16 and gatherings(usual) == ceil(max(usual.sequences_per_replica) / 16) > 2
    )
    assert gatherings(few) == 1 and few.placement.micro_sequences >= max(few.sequences_per_replica)
    size = few.placement.micro_sequences
    told = f"{size} sequences at a time, not 16: split parameters are gathered once a step instead of"
    assert sum(told in line for line in few.reasons) == 1 and not any("gathered" in line for line in usual.reasons)
    assert few.forecast is not None and usual.forecast is not None
    assert few.forecast.tensor_bytes > usual.forecast.tensor_bytes


def test_the_forecast_counts_as_many_gatherings_as_there_are(tmp_path: Path) -> None:
    """Half as many cost half as much, where next to nothing of them can run under arithmetic."""
    fully = 'layout.shard_what="parameters"'
    plans = [
        plan_of(tmp_path, fully, f"layout.micro_sequences={size}", speeds=(1.0, 1.0), rate=NARROW / 100)
        for size in (16, 32)
    ]
    assert [gatherings(plan) for plan in plans] == [4, 2]
    sixteen, thirty_two = (
        plan.forecast.items.messages_s
        for plan in plans
        if plan.forecast is not None and plan.forecast.items is not None
    )
    assert sixteen == pytest.approx(2 * thirty_two, rel=0.01)


@pytest.mark.slow
def test_what_a_person_names_and_what_splits_no_parameters_stays(tmp_path: Path) -> None:
    named = plan_of(tmp_path, 'layout.shard_what="parameters"', "layout.micro_sequences=4")
    assert named.placement.micro_sequences == 4
    optimizer = plan_of(tmp_path, 'layout.shard_what="optimizer"')
    assert optimizer.placement.micro_sequences == 16 and not any("gathered" in line for line in optimizer.reasons)


def test_the_words_for_fewer_gatherings() -> None:
    assert fewer_gathers_reason(16, 63, 50) == [
        "up to 63 sequences at a time, not 16: split parameters are gathered once a step instead of 4"
    ]
    assert "2 times a step instead of 4" in fewer_gathers_reason(16, 32, 50)[0]
