"""Heads in the middle and prediction ahead in the plan: what is counted, where stages are cut, which order is told."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest

from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.cluster import read_cluster
from plait.model.parts.objectives import ObjectivesShape
from plait.model.shape import ModelShape, parameter_count
from plait.model.weights import training_flops_per_token
from plait.planner.explain.choice import objective_lines, order_prices
from plait.planner.problem.candidates import SHARDED_STATES, Candidates
from plait.planner.problem.stage_partition import (
    balanced_with_heads,
    head_cost_in_layers,
    head_places,
    rank_layers,
    stages_of,
)
from plait.planner.problem.workload import workload_of
from plait.planner.search.enumeration import Constraints
from plait.planner.search.found import Search
from plait.planner.search.search import search
from plait.planner.search.validity import balanced_stages, check_layout

SHAPE = ModelShape(
    layers=8, width=256, heads=8, kv_heads=4, head_width=32, ffn=640, vocabulary=4096, sequence=256,
    objectives=ObjectivesShape(heads=(2, 5), head_weights=(0.3, 0.3), ahead=1),
)  # fmt: skip
PLAIN = replace(SHAPE, objectives=ObjectivesShape())


@pytest.mark.parametrize("tied", [False, True])
def test_a_workload_counts_what_the_model_has(tied: bool) -> None:
    shape = replace(SHAPE, tied=tied)
    w = workload_of(shape, sequence=256, batch_sequences=16)
    assert w.parameters == pytest.approx(parameter_count(shape), rel=0.01)
    for counting in ("full", "causal"):
        assert w.flops_per_token(counting) == pytest.approx(training_flops_per_token(shape, 256, counting), rel=1e-3)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_stages_are_cut_where_heads_stand_and_as_evenly_as_can_be(stages: int) -> None:
    w = workload_of(SHAPE, sequence=256, batch_sequences=16)
    head = head_cost_in_layers(workload_of(PLAIN, sequence=256, batch_sequences=16))
    end = head_cost_in_layers(w)

    def dearest(cuts: tuple[int, ...]) -> float:
        edges = [0, *cuts, 8]
        return max(b - a + head * sum(a < after <= b for after in (2, 5)) + end * (b == 8) for a, b in pairwise(edges))

    found = balanced_with_heads((8, head, end), stages, (2, 5))
    best = min(dearest(cuts) for cuts in combinations(range(1, 8), stages - 1))
    assert dearest(tuple(accumulate(found))[:-1]) == pytest.approx(best)
    assert stages_of(w, stages, "balanced") == balanced_stages(SHAPE, stages) == found


def test_ranks_have_what_stands_on_them() -> None:
    w = workload_of(SHAPE, sequence=256, batch_sequences=16)
    assert head_places(w, (3, 3, 2), 3).tables == (2, 1, 2) and head_places(w, (3, 3, 2), 3).heads == (1, 1, 2)
    assert head_places(replace(w, tied=True), (3, 3, 2), 3).tables == (1, 1, 1)
    held = rank_layers(w, Candidates.from_rows([{"pipeline": 1}, {"pipeline": 4}], "balanced"))
    assert held.last_heads[0] == 4 and held.fullest[0] == pytest.approx(8 + w.layers_and_depths - 8)
    assert held.middle_heads[1] >= 1


def searched(shape: ModelShape, cluster: str, pipeline: int = 1) -> Search:
    w = workload_of(shape, sequence=256, batch_sequences=64, precision="bf16")
    constraints = Constraints(degrees=Layout(pipeline=pipeline), knobs={"micro_sequences": 2})
    return search(w, read_cluster(cluster), constraints=constraints)


def test_they_take_time_and_memory_where_they_stand() -> None:
    for ranks in (1, 4):
        more, plain = (searched(one, f"{ranks}xA100", ranks) for one in (SHAPE, PLAIN))
        assert more.chosen_step_s > 1.1 * plain.chosen_step_s
        assert more.bytes_per_device(more.chosen) > plain.bytes_per_device(plain.chosen)


def test_the_plan_prices_both_orders_and_says_which_is_needed() -> None:
    found = searched(SHAPE, "4xA100", pipeline=4)
    prices = order_prices(found)
    assert prices["gpipe"].bytes_per_device > 1.1 * prices["1f1b"].bytes_per_device
    [first, second] = objective_lines(found)
    assert first.startswith("heads after 2 and 5 layers and 1 token predicted further add ")
    assert "1F1B carries all of them" in second and "needed only for a loss whose first gradient" in second
    assert "it keeps every micro-batch of the step in memory" in second
    assert objective_lines(searched(PLAIN, "4xA100", pipeline=4)) == []
    [_, alone] = objective_lines(searched(SHAPE, "1xA100"))
    assert "without a pipeline" in alone


def test_stages_that_gather_one_matrix_each_for_itself_are_refused() -> None:
    layout = Layout(pipeline=2, shard=2, shard_what="parameters", schedule="interleaved", stage_layers=(2, 2, 2, 2))
    with pytest.raises(PlaitError, match=r'choose layout.shard_what = "optimizer"'):
        check_layout(layout, SHAPE, sequence=256, batch_sequences=16)
    check_layout(layout, PLAIN, sequence=256, batch_sequences=16)
    w = workload_of(SHAPE, sequence=256, batch_sequences=64)
    rows = search(w, read_cluster("8xA100")).candidates
    assert (
        len(rows)
        and not ((rows.virtual > 1) & (rows.shard > 1) & (rows.shard_what == SHARDED_STATES.index("parameters"))).any()
    )
    assert np.unique(rows.virtual).size > 1
