"""The planner's choice: all layouts that are possible and no other, the simplest of the fast ones, true remedies."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest

from plait.errors import PlaitError
from plait.layout import AXES, Layout
from plait.machines.cluster import read_cluster
from plait.model.adapter_shape import AdapterShape, Quantization
from plait.model.shape import ModelShape, linear_layers
from plait.model.sizes import named_shape
from plait.partition.pipeline_schedule import schedule_actions
from plait.partition.pipeline_simulation import ActionTimes, StageTimes, durations_s, simulate
from plait.planner.explain.changes import LinkPlace, error_with_suggestions, with_faster_links
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.search import enumeration
from plait.planner.search.complexity import COMPLEXITY_TABLE, complexity_of
from plait.planner.search.enumeration import Constraints, divisors, enumerate_layouts
from plait.planner.search.feasibility import DoesNotFit
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import step_time_of
from plait.planner.search.search import search, simplest, with_other_links
from plait.planner.search.validity import balanced_stages, check_layout
from plait.planner.step_time.network_model import network_of
from tests.planner.cost_inputs import inputs

SMALL = ModelShape(layers=6, width=64, heads=4, kv_heads=2, head_width=16, ffn=128, vocabulary=256, sequence=1024)


def work(size: str, batch: int, sequence: int = 4096) -> Workload:
    shape = named_shape(size, vocabulary=128256, sequence=sequence)
    return workload_of(shape, sequence=sequence, batch_sequences=batch)


def llama_405b() -> Workload:
    return work("405B", 2048, 8192)


@pytest.mark.parametrize("devices", [1, 6, 8, 12])
def test_every_possible_mix_of_degrees_is_listed_and_no_other(devices: int) -> None:
    found = enumerate_layouts(workload_of(SMALL, sequence=1024, batch_sequences=4), devices, Constraints()).candidates
    rows = {(int(p), int(r), int(s), int(c), int(t)) for p, r, s, c, t in
            zip(found.pipeline, found.replicate, found.shard, found.context, found.tensor, strict=True)}  # fmt: skip
    possible = set()
    numbers = divisors(devices)
    for pipeline in numbers:
        for replicate in numbers:
            for shard in numbers:
                for context in (1, 2, 4):  # parts of 256 tokens at least
                    for tensor in numbers:
                        degrees = (pipeline, replicate, shard, context, tensor)
                        if np.prod(degrees) == devices and carries(degrees):
                            possible.add(degrees)
    assert rows == possible


def carries(degrees: tuple[int, ...]) -> bool:
    pipeline, replicate, shard, context, tensor = degrees
    try:
        stages = balanced_stages(SMALL, pipeline) if pipeline > 1 else ()
        layout = Layout(
            pipeline=pipeline, replicate=replicate, shard=shard, context=context, tensor=tensor, stage_layers=stages
        )
        check_layout(layout, SMALL, sequence=1024, batch_sequences=4)
    except PlaitError:
        return False
    return True


def test_all_knobs_multiply_out_for_a_pipeline() -> None:
    pins = Constraints(degrees=Layout(pipeline=2, shard=2))
    found = enumerate_layouts(workload_of(SMALL, sequence=1024, batch_sequences=4), 4, pins)
    rows = [found.candidates.row(index) for index in range(len(found.candidates))]
    knobs = {(r["shard_what"], r["schedule"], r["virtual"], r["micro_sequences"], r["recompute"]) for r in rows}
    weaves = {("optimizer", "1f1b", 1), ("optimizer", "zero-bubble", 1), ("parameters", "1f1b", 1),
              ("optimizer", "interleaved", 2), ("parameters", "interleaved", 2),
              ("optimizer", "interleaved", 3), ("parameters", "interleaved", 3)}  # fmt: skip
    # Six layers do not fill 4 chunks, yet with table and head counted as layers they do.
    assert {knob[:3] for knob in knobs} == weaves
    assert len(rows) == len(knobs) == len(weaves) * 2 * 3  # one or two sequences at a time, three ways to recompute
    assert (
        found.refused[enumeration.INCOMPATIBLE_SPLITS] == 2
    )  # zero-bubble with split parameters, each number of sequences
    assert found.refused[enumeration.GPIPE_NEEDLESS] == 1


def test_the_simplest_within_the_tolerance_wins_and_the_fastest_of_those() -> None:
    step_s, points = np.array([1.0, 1.04, 1.03, 1.06, 2.0]), np.array([30, 2, 2, 1, 0])
    assert simplest(step_s, points, 0.05) == 2
    assert simplest(step_s, points, 0.08) == 3
    assert simplest(step_s, points, 0.0) == 0


def test_complexity_is_an_ordered_table_whose_axes_weigh_most() -> None:
    rows = [
        {},
        {"replicate": 8},
        {"shard": 8, "shard_what": "optimizer"},
        {"shard": 8, "shard_what": "parameters"},
        {"shard": 4, "replicate": 2, "shard_what": "parameters"},
        {"shard": 4, "replicate": 2, "shard_what": "parameters", "recompute": "full"},
        {"tensor": 8},
        {"pipeline": 8},
        {"pipeline": 8, "schedule": "interleaved", "virtual": 2},
        {"pipeline": 8, "schedule": "zero-bubble"},
        {"pipeline": 4, "tensor": 2},
        {"tensor": 16},
    ]
    points = complexity_of(Candidates.from_rows(rows), network_of(read_cluster("2x(8xH100)+400G")))
    assert list(points) == [0, 0, 1, 2, 3, 5, 10, 12, 15, 16, 22, 15]
    assert all(rung.what for rung in COMPLEXITY_TABLE)


@pytest.fixture(scope="module")
def small_search() -> Search:
    return search(work("70B", 256), read_cluster("2x(8xA100)+400G"))


def test_what_is_chosen_fits_and_nothing_simpler_is_as_fast(small_search: Search) -> None:
    found = small_search
    capacity = found.cluster.islands[0].device.memory_bytes
    assert (found.judged_bytes <= capacity).all()
    simpler = found.complexity < found.complexity[found.chosen]
    assert (found.step_s[simpler] > 1.08 * found.step_s.min()).all()
    assert found.step_s[found.chosen] <= 1.08 * found.step_s.min()
    assert found.step_s.argmin() == found.fastest


def test_nothing_is_computed_again_where_keeping_it_fits(small_search: Search) -> None:
    again = np.flatnonzero(small_search.candidates.recompute > 0)
    assert len(again)
    for index in again:
        row = small_search.candidates.row(int(index))
        asked = pinned({**row, "recompute": "none"})
        try:
            found = search(small_search.workload, small_search.cluster, constraints=asked)
        except DoesNotFit:
            continue
        # Whoever asks for it gets it, but it has no room for what the forecast may be too low by.
        assert not found.fits_sparingly(found.chosen)


def test_every_listed_layout_is_priced_or_refused(small_search: Search) -> None:
    found = enumerate_layouts(small_search.workload, 16, Constraints())
    late = small_search.n_refused - sum(found.refused.values())
    assert len(found.candidates) == len(small_search.candidates) + late


def pinned(row: dict[str, int | str]) -> Constraints:
    knobs = {knob: row[knob] for knob in ("recompute", "schedule", "virtual", "micro_sequences")}
    knobs |= {"shard_what": row["shard_what"]} if int(row["shard"]) > 1 else {}
    return Constraints(degrees=Layout(**{axis: int(row[axis]) for axis in AXES}), knobs=knobs)


@pytest.mark.parametrize("name", ["2x(8xA100)+400G", "4090+2x3090@10G"])
@pytest.mark.parametrize("link", ["between", "inside"])
def test_on_other_links_only_times_change(name: str, link: LinkPlace) -> None:
    cluster, job = read_cluster(name), work("125M", 64, 1024)
    other = with_faster_links(cluster, link, 0.1)
    reused, fresh = with_other_links(search(job, cluster), other), search(job, other)
    assert np.array_equal(reused.step_s, fresh.step_s) and reused.refused == fresh.refused
    assert (reused.chosen, reused.fastest, reused.cluster) == (fresh.chosen, fresh.fastest, other)


def test_pinned_degrees_are_obeyed_and_knobs_too() -> None:
    pins = Constraints(degrees=Layout(tensor=4, replicate=2), knobs={"micro_sequences": 2, "recompute": "full"})
    found = search(work("1B", 64, 1024), read_cluster("8xH100"), constraints=pins)
    rows = [found.candidates.row(index) for index in range(len(found.candidates))]
    assert all((r["tensor"], r["replicate"], r["shard"], r["pipeline"]) == (4, 2, 1, 1) for r in rows)
    assert all((r["micro_sequences"], r["recompute"]) == (2, "full") for r in rows)


def test_a_batch_that_does_not_divide_costs_what_its_fullest_devices_take() -> None:
    cluster, row = read_cluster("8xH100"), Candidates.from_rows([{"replicate": 8}])
    uneven, filled = (
        step_time_of(inputs(work("1B", batch, 1024), cluster, row, PLAIT_PROFILE)).step_s[0] for batch in (57, 64)
    )
    assert uneven == filled


def test_a_mixture_of_experts_is_planned_on_its_own_axis() -> None:
    sparse = replace(work("7B", 512), experts=16, experts_per_token=2, expert_ffn=11008)
    found = search(sparse, read_cluster("64xH100"))
    assert set(np.unique(found.candidates.expert)) == {1, 2, 4, 8, 16}
    assert found.candidates.expert[found.fastest] > 1


def test_many_pipelines_at_once_take_as_long_as_the_schedule_itself() -> None:
    numbers = random.Random(3)
    for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble"):
        for _ in range(6):
            ranks, virtual, micros = numbers.randint(2, 6), numbers.randint(1, 3), numbers.randint(1, 12)
            virtual = virtual if schedule == "interleaved" else 1
            there, back, late = np.array([[numbers.uniform(0.5, 2) for _ in range(ranks * virtual)] for _ in range(3)])
            spent: ActionTimes = {
                "forward": there[:, None],
                "backward-input": back[:, None],
                "backward-weight": late[:, None],
            }
            ours = durations_s(schedule, (ranks, virtual, micros), spent)[0]
            stages = StageTimes(forward_s=tuple(there), backward_input_s=tuple(back), backward_weight_s=tuple(late))
            lists = schedule_actions(schedule, ranks=ranks, virtual=virtual, micros=micros)
            assert ours == pytest.approx(simulate(lists, stages).duration_s)


@pytest.mark.parametrize(
    ("size", "cluster", "batch"),
    [("405B", "8xH100", 64), ("70B", "8x4090", 64), ("1.3B", "2x(1x3080)@1G", 16), ("70B", "2x(3x4090)@10G", 48)],
)
def test_what_fits_nowhere_is_told_with_what_would_help(size: str, cluster: str, batch: int) -> None:
    with pytest.raises(DoesNotFit) as caught:
        search(work(size, batch), read_cluster(cluster))
    told = str(error_with_suggestions(caught.value, Constraints()))
    assert "cheapest first: " in told
    times = int(told.split(" times as many devices")[0].split()[-1])
    larger = read_cluster(cluster)
    grown = replace(larger, islands=tuple(replace(i, nodes=i.nodes * times) for i in larger.islands))
    search(work(size, batch * times), grown)  # fits
    smaller = told.split('model.size = "')[1].split('"')[0]
    search(work(smaller, batch), read_cluster(cluster))  # fits


LLAMA_8B = ModelShape(
    layers=32, width=4096, heads=32, kv_heads=8, head_width=128, ffn=14336, vocabulary=128256, sequence=8192
)  # fmt: skip


@pytest.mark.parametrize(("rank", "sequence"), [(256, 8192), (256, 2048), (64, 8192), (0, 2048)])
def test_beside_a_base_model_each_suggestion_fits_and_keeps_the_base(rank: int, sequence: int) -> None:
    def tuned(rank: int, sequence: int, quantization: Quantization = "none") -> Workload:
        targets = linear_layers(LLAMA_8B)
        adapter = AdapterShape(rank=rank, alpha=32, targets=targets, quantization=quantization) if rank else None
        sequences = 8 * 8192 // sequence
        return workload_of(replace(LLAMA_8B, adapter=adapter), sequence=sequence, batch_sequences=sequences)

    with pytest.raises(DoesNotFit) as caught:
        search(tuned(rank, sequence), read_cluster("1x4090"))
    told = str(error_with_suggestions(caught.value, Constraints(), starts_from="a base model"))
    assert "model.size" not in told
    suggestions = told.split("cheapest first: ")[1].split(", or ")
    ours = [one for one in suggestions if one.startswith(("train.", "finetune."))]
    assert any("finetune." in one for one in ours)
    for one in ours:
        named = {key: int(value) for key, value in re.findall(r"(rank|sequence) = (\d+)", one)}
        quantization: Quantization = "nf4" if "qlora" in one else "none"
        search(tuned(named.get("rank", rank), named.get("sequence", sequence), quantization), read_cluster("1x4090"))


def test_16384_devices_are_planned_from_a_list_of_bounded_length() -> None:
    """Time follows the number of layouts that are priced or refused: half a second on an idle core for these."""
    found = search(llama_405b(), read_cluster("16384xH100"))
    assert found.cluster.n_devices == 16384
    assert len(found.candidates) < 50_000 and found.n_refused < 200_000


def test_a_layout_costs_the_same_alone_as_among_others_that_fill_the_batch_otherwise() -> None:
    workload = work("1B", 10)
    found = search(workload, read_cluster("8xH100"))
    alone = [
        step_time_of(inputs(workload, found.cluster, found.candidates.select(np.array([i])), PLAIT_PROFILE)).step_s[0]
        for i in range(40)
    ]
    assert step_time_of(inputs(workload, found.cluster, found.candidates, PLAIT_PROFILE)).step_s[:40] == pytest.approx(
        alone
    )
