"""Do the planner's stages hold every layer once, and are they those that a run would have?"""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.commands.planning.plan_report import make_plan_report
from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.cluster import read_cluster
from plait.model.sizes import MODEL_SIZES, named_shape
from plait.planner.derive.resources import on_paper
from plait.planner.memory.estimate import estimate_memory
from plait.planner.problem.candidates import Candidates, LayerSplit
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.problem.stage_partition import (
    balanced_stages_by_cost,
    head_cost_in_layers,
    layers_of_stages,
    published_stages,
    rank_layers,
)
from plait.planner.problem.trained_weights import fullest_trained_parameters
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.search.enumeration import Constraints, enumerate_layouts
from plait.planner.search.layout_cost import step_seconds
from plait.planner.search.search import search
from plait.planner.search.validity import balanced_stages
from plait.planner.step_time.pipeline_step_time import simulated_step_s
from plait.planner.step_time.step_time import estimate_step_time
from plait.recipe.load import load_recipe
from plait.recipe.schema import RunConfig
from tests.matrix import few_fast
from tests.planner.cost_inputs import inputs

CLUSTER = read_cluster("1024xH100")


def work(layers: int, vocabulary: int = 32000, batch: int = 32) -> Workload:
    return Workload(
        layers=layers, width=1024, heads=8, kv_heads=8, head_width=128, ffn=4096, gated=False, vocabulary=vocabulary,
        tied=False, sequence=1024, batch_sequences=batch,
    )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    dealing=st.sampled_from(["balanced", "published"]),
    pipeline=st.integers(1, 16),
    virtual=st.integers(1, 8),
    more=st.integers(0, 150),
    vocabulary=st.sampled_from([256, 32000, 1_000_000]),
)
def test_every_layer_is_on_one_stage(
    dealing: LayerSplit, pipeline: int, virtual: int, more: int, vocabulary: int
) -> None:
    layers = pipeline * virtual + more
    workload = work(layers, vocabulary)
    each = layers_of_stages(layers, pipeline * virtual, head_cost_in_layers(workload), dealing)
    ranks = [sum(each[rank::pipeline]) for rank in range(pipeline)]
    held = rank_layers(workload, Candidates.from_rows([{"pipeline": pipeline, "virtual": virtual}], dealing))
    others = sum(ranks[1:-1])
    ends = held.first[0] if pipeline == 1 else held.first[0] + held.last[0]
    assert ends + others == sum(ranks) == sum(each) == layers and min(each) >= 1
    assert held.fullest[0] == max(ranks)
    behind = ranks[pipeline - int(held.ranks_after_fullest[0]) :]
    assert all(count < held.fullest[0] for count in behind) and ranks[-1 - len(behind)] == held.fullest[0]
    assert held.fullest_after[0] == max(behind[:-1], default=0)


@pytest.mark.parametrize("dealing", ["balanced", "published"])
def test_two_stages_lose_no_layer_of_an_odd_number(dealing: LayerSplit) -> None:
    held = rank_layers(work(7), Candidates.from_rows([{"pipeline": 2}], dealing))
    assert held.first[0] + held.last[0] == 7 and held.fullest[0] == max(held.first[0], held.last[0])


@settings(max_examples=60, deadline=None)
@given(layers=st.integers(1, 11), stages=st.integers(1, 6), head=st.floats(0, 6))
def test_no_other_way_to_deal_has_a_cheaper_dearest_stage(layers: int, stages: int, head: float) -> None:
    layers = max(layers, stages)

    def dearest(each: tuple[int, ...]) -> float:
        return max(*each[:-1], each[-1] + head) if stages > 1 else each[0] + head

    cuts = combinations(range(1, layers), stages - 1)
    ways = [tuple(np.diff([0, *cut, layers]).tolist()) for cut in cuts]
    assert dearest(balanced_stages_by_cost(layers, stages, head)) == pytest.approx(min(map(dearest, ways)))


@pytest.mark.parametrize("size", MODEL_SIZES)
def test_what_is_priced_is_what_would_run(size: str) -> None:
    shape = named_shape(size, vocabulary=50257, sequence=1024)
    head = head_cost_in_layers(workload_of(shape, sequence=1024, batch_sequences=8))
    for stages in range(1, shape.layers + 1):
        assert layers_of_stages(shape.layers, stages, head, "balanced") == balanced_stages(shape, stages)


def test_published_stages_spare_the_ends() -> None:
    assert published_stages(8, 4) == (2, 2, 2, 2)
    assert published_stages(126, 16) == (7, *[8] * 14, 7)
    assert published_stages(7, 4) == (1, 2, 2, 2) and published_stages(6, 5) == (1, 1, 1, 2, 1)


def test_a_large_head_empties_the_last_stage() -> None:
    assert balanced_stages_by_cost(8, 4, 0.0) == (2, 2, 2, 2)
    assert balanced_stages_by_cost(8, 4, 1.5) == (3, 2, 2, 1)
    assert balanced_stages_by_cost(9, 2, 3.0) == (6, 3)


def test_named_stages_are_priced_as_named() -> None:
    """Two stages of 1 and 7 layers: the fuller sets the pace, and holds the weights and the activations of seven."""
    workload = work(8, batch=64)
    even, odd, swapped = (
        enumerate_layouts(workload, 2, pins_of_stages(*stages)).candidates for stages in ((4, 4), (1, 7), (7, 1))
    )
    seconds = [step_seconds(inputs(workload, CLUSTER, each, PLAIT_PROFILE))[0] for each in (even, odd, swapped)]
    assert seconds[1] > seconds[2] > 1.3 * seconds[0]  # the head stands with the last stage
    assert seconds[1] < 2 * seconds[0]
    assert fullest_trained_parameters(workload, odd)[0][0] > 1.3 * fullest_trained_parameters(workload, even)[0][0]
    activations = [estimate_memory(workload, each, PLAIT_PROFILE).activations[0] for each in (even, odd, swapped)]
    assert activations[2] > activations[0]


def pins_of_stages(*stages: int) -> Constraints:
    knobs = {"micro_sequences": 1, "recompute": "none", "schedule": "1f1b"}
    return Constraints(degrees=Layout(pipeline=2), knobs=knobs, stage_layers=stages)


def test_named_stages_on_a_rank_settle_its_chunks() -> None:
    found = search(
        work(12), read_cluster("4xH100"), constraints=Constraints(degrees=Layout(pipeline=4), stage_layers=(2, 1) * 4)
    )
    rows = [found.candidates.row(index) for index in range(len(found.candidates))]
    assert {(row["virtual"], row["schedule"]) for row in rows} == {(2, "interleaved")}
    assert found.candidates.layer_split == (2, 1) * 4
    assert rank_layers(found.workload, found.candidates).fullest.tolist() == [4.0] * len(rows)


def asked(folder: Path, *layout: str) -> RunConfig:
    (folder / "recipe.toml").write_text('[data]\nfiles = "text.txt"\n')
    return load_recipe(folder / "recipe.toml", ("model.size=350M", "layout.pipeline=2", *layout))


def test_a_recipes_stages_reach_the_price(tmp_path: Path) -> None:
    even, odd = (
        make_plan_report(asked(tmp_path, f"layout.stage_layers={stages}"), on_paper(read_cluster("2x4090")), top=0)
        for stages in ("[13, 11]", "[23, 1]")
    )
    assert odd.search.candidates.layer_split == (23, 1)
    assert odd.search.step_s[odd.search.chosen] > 1.5 * even.search.step_s[even.search.chosen]
    assert not any("stage_layers" in note for note in odd.notes)


def test_a_named_pipeline_is_priced_in_the_order_in_which_it_would_run(tmp_path: Path) -> None:
    for layout, order in (((), ("1f1b", 1)), (("layout.virtual_stages=2",), ("interleaved", 2))):
        found = make_plan_report(asked(tmp_path, *layout), on_paper(read_cluster("2x4090")), top=0).search
        rows = [found.candidates.row(index) for index in range(len(found.candidates))]
        assert {(row["schedule"], row["virtual"]) for row in rows} == {order}


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (("layout.stage_layers=[12, 11]",), "add up to the model's 24 layers"),
        (("layout.stage_layers=[12, 12]", "layout.virtual_stages=2"), "leave one of the two out"),
        (("layout.stage_layers=[6, 6, 6, 6]", "layout.schedule=1f1b"), "need layout.schedule"),
        (("layout.schedule=interleaved",), "needs several stages on each worker"),
        (("layout.virtual_stages=2", "layout.schedule=1f1b"), "need layout.schedule"),
    ],
)
def test_stages_that_cannot_run_are_one_sentence(layout: tuple[str, ...], says: str, tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=says):
        make_plan_report(asked(tmp_path, *layout), on_paper(read_cluster("2x4090")), top=0)


def test_plaits_own_layouts_are_dealt_as_they_would_run() -> None:
    found = enumerate_layouts(work(8), 8, Constraints()).candidates
    assert found.layer_split == "balanced" == found.select(np.array([0])).layer_split


@pytest.mark.parametrize("dealing", few_fast(["published", "balanced"], "balanced"))
def test_the_closed_form_is_the_simulated_time_or_lower(dealing: LayerSplit) -> None:
    """Over 200 random pipelines, chunks of a single layer among them, 2 % above at most. Only the
    simulation leaves launching and waiting where they are while zero-bubble puts other work off."""
    numbers = random.Random(1)
    differences = []
    while len(differences) < 200:
        case = random_pipeline(numbers, dealing)
        if case is None:
            continue
        workload, candidates = case
        times = estimate_step_time(inputs(workload, CLUSTER, candidates, PLAIT_PROFILE))
        differences.append(
            times.step_s[0] / simulated_step_s(inputs(workload, CLUSTER, candidates, PLAIT_PROFILE), times)[0] - 1
        )
    assert max(differences) <= 0.02, sorted(differences)[-5:]
    assert abs(np.median(differences)) <= 0.006


def random_pipeline(numbers: random.Random, dealing: LayerSplit) -> tuple[Workload, Candidates] | None:
    shape = named_shape(numbers.choice(["7B", "13B", "70B", "175B", "405B"]), vocabulary=128256, sequence=4096)
    schedule = numbers.choice(["gpipe", "1f1b", "interleaved", "zero-bubble"])
    ranks, virtual = numbers.randint(2, 12), numbers.randint(2, 5) if schedule == "interleaved" else 1
    chunks, micros, tensor = ranks * virtual, numbers.randint(1, 40), numbers.choice([1, 2, 4, 8])
    even = shape.layers % chunks == 0 or (shape.layers + 2) % chunks == 0
    if shape.layers < chunks or (virtual > 1 and not even):
        return None
    row = {"pipeline": ranks, "virtual": virtual, "tensor": tensor, "schedule": schedule, "sequence_parallel": 1}
    row["recompute"] = numbers.choice(["none", "full"])
    return workload_of(shape, sequence=4096, batch_sequences=micros), Candidates.from_rows([row], dealing)
