"""Is the planner's price of a step what arithmetic, links and schedules allow, and does it move the right way?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from plait.machines.catalog import link_at_rate
from plait.machines.cluster import Cluster, read_cluster
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.program_profiles import MEGATRON
from plait.planner.problem.software_profile import PLAIT_PROFILE, SoftwareProfile
from plait.planner.problem.workload import Workload
from plait.planner.step_time.device_rates import device_rates
from plait.planner.step_time.network_model import collective_s, network_of
from plait.planner.step_time.roofline import product_s
from plait.planner.step_time.step_time import estimate_step_time
from tests.planner.cost_inputs import inputs

LLAMA_70B = Workload(
    layers=80,
    width=8192,
    heads=64,
    kv_heads=8,
    head_width=128,
    ffn=28672,
    gated=True,
    vocabulary=128256,
    tied=False,
    sequence=8192,
    batch_sequences=512,
)
H100 = read_cluster("64xH100")


def step_s(knobs: Mapping[str, int | str], cluster: Cluster = H100, profile: SoftwareProfile = PLAIT_PROFILE) -> float:
    return float(estimate_step_time(inputs(LLAMA_70B, cluster, Candidates.from_rows([knobs]), profile)).step_s[0])


def test_parameters_and_arithmetic_are_those_of_the_published_models():
    assert LLAMA_70B.parameters == pytest.approx(70.55e9, rel=0.002)
    assert LLAMA_70B.flops_per_token("full") == pytest.approx(6 * 69.5e9 + 12 * 80 * 8192 * 8192, rel=0.002)
    deepseek = replace(
        LLAMA_70B,
        layers=61,
        width=7168,
        heads=128,
        kv_heads=128,
        head_width=160,
        ffn=18432,
        vocabulary=129280,
        experts=256,
        experts_per_token=8,
        expert_ffn=2048,
        shared_ffn=2048,
        dense_layers=3,
        projection_weights=187_000_000,
    )
    assert deepseek.parameters == pytest.approx(671e9, rel=0.01)
    assert deepseek.active_parameters == pytest.approx(37e9, rel=0.03)


def test_no_step_is_faster_than_the_peak_allows():
    needed = (
        LLAMA_70B.flops_per_token("causal") * LLAMA_70B.batch_tokens / (64 * H100.islands[0].device.peak_flops["bf16"])
    )
    sharded = {"shard": 64, "shard_what": "parameters"}
    for knobs in (sharded, {"tensor": 8, "shard": 8}, {"pipeline": 8, "shard": 8, "shard_what": "optimizer"}):
        assert step_s(knobs) > needed


def test_what_stays_gathered_is_gathered_once_a_step():
    """Seconds of all gathers and sums, exposed or hidden, against the bytes that parallel/fully_sharded.py moves."""
    work = replace(LLAMA_70B, batch_sequences=8 * 64)
    # Gathers of layers, and sums, of a step of eight micro-batches.
    often = {"master-weights": (1, 1), "gradients": (1, 8), "parameters": (16, 8)}
    table = Candidates.from_rows([{"shard": 64, "shard_what": what, "micro_sequences": 1} for what in often])
    priced = inputs(work, H100, table, replace(PLAIT_PROFILE, lasting_weights="once a step"))
    found, slower = estimate_step_time(priced), priced.device_time.rates.kernels.message_units
    spent = found.parameters + found.gradients + (1 - slower) * found.hidden_sync
    network, tables = network_of(H100), work.embedding_parameters
    layers = work.parameters - 2 * tables

    pieces = work.layers * PLAIT_PROFILE.other.layer_pieces

    def moved(kind: Literal["gather", "scatter"], size: float, messages: float) -> float:
        return float(collective_s(network, kind, size, 64, 1, messages)[()])

    lasting = moved("gather", 4 * tables, 1) + moved("gather", 2 * tables, 1)
    passes, summed = moved("gather", 2 * layers, pieces), moved("scatter", 4 * work.parameters, pieces)
    for time_s, (gathers, sums) in zip(spent, often.values(), strict=True):
        assert time_s == pytest.approx(lasting + gathers * passes + sums * summed, rel=0.01)


def test_the_items_add_up_to_the_step():
    table = Candidates.from_rows(
        [
            {"pipeline": 4, "virtual": 5, "shard": 4, "tensor": 4, "shard_what": "optimizer"},
            {"shard": 8, "tensor": 8, "shard_what": "parameters", "recompute": "full"},
            {"replicate": 8, "context": 8},
        ]
    )
    priced = estimate_step_time(inputs(LLAMA_70B, H100, table, MEGATRON))
    names = set(priced.__dataclass_fields__) - {"step_s", "hidden", "hidden_sync", "busiest_layers"}
    np.testing.assert_allclose(sum(getattr(priced, name) for name in names), priced.step_s)
    assert all((getattr(priced, name) >= 0).all() for name in names)


def test_many_candidates_at_once_cost_what_each_costs_alone():
    rows = [
        {"pipeline": p, "tensor": t, "shard": 64 // (p * t), "shard_what": what, "recompute": "full"}
        for p in (1, 2, 4)
        for t in (1, 2, 8)
        for what in ("optimizer", "parameters")
    ]
    together = estimate_step_time(inputs(LLAMA_70B, H100, Candidates.from_rows(rows), PLAIT_PROFILE)).step_s
    alone = [
        estimate_step_time(inputs(LLAMA_70B, H100, Candidates.from_rows([row]), PLAIT_PROFILE)).step_s[0]
        for row in rows
    ]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_more_micro_batches_shrink_the_bubble_by_the_closed_form():
    def bubble_share(batch: int, virtual: int) -> float:
        work = replace(LLAMA_70B, batch_sequences=batch)
        row = {"pipeline": 8, "virtual": virtual, "tensor": 8, "recompute": "full"}
        priced = estimate_step_time(
            inputs(work, H100, Candidates.from_rows([row]), replace(PLAIT_PROFILE, step_s=0.0, hides_pipeline=1.0))
        )
        return float((priced.bubble / (priced.step_s - priced.bubble - priced.optimizer))[0])

    assert bubble_share(64, 1) == pytest.approx(7 / 64, rel=0.15)
    assert bubble_share(128, 1) == pytest.approx(bubble_share(64, 1) / 2, rel=0.02)
    assert bubble_share(64, 5) == pytest.approx(bubble_share(64, 1) / 5, rel=0.1)


def test_narrow_roads_force_a_pipeline_and_wide_ones_need_none():
    sharded = {"shard": 64, "shard_what": "parameters", "recompute": "full"}
    piped = {"pipeline": 8, "tensor": 8, "shard": 1, "recompute": "full"}
    clusters = [replace(H100, between=link_at_rate(gbit, "device")) for gbit in (1, 10, 100, 400, 1600)]
    by_sharding = [step_s(sharded, cluster) for cluster in clusters]
    narrow = replace(PLAIT_PROFILE, stage_transfer="bf16")  # messages of two bytes a number, as those of sharding
    by_stages = [step_s(piped, cluster, narrow) for cluster in clusters]
    assert by_sharding == sorted(by_sharding, reverse=True)
    assert by_stages == sorted(by_stages, reverse=True)
    assert by_sharding[0] > 2 * by_stages[0]
    assert by_sharding[-1] < by_stages[-1]


def test_tensor_parallelism_costs_more_between_nodes_than_inside():
    def exposed(tensor: int) -> float:
        row = {"tensor": tensor, "shard": 64 // tensor, "sequence_parallel": 1}
        priced = estimate_step_time(inputs(LLAMA_70B, H100, Candidates.from_rows([row]), PLAIT_PROFILE))
        return float((priced.tensor / priced.products)[0])

    assert exposed(16) > 2 * exposed(8)
    assert exposed(8) > 1.2 * exposed(4)


def test_a_ring_between_nodes_uses_all_cards_of_the_node():
    road = network_of(H100)
    message = 1e9
    inside = collective_s(road, "gather", message, 8, 1)
    both = collective_s(road, "gather", message, 16, 1)
    lonely = collective_s(road, "gather", message, 2, 8)  # one rank of each node, so one card each
    assert inside == pytest.approx(message * 7 / 8 / road.inside_bytes_per_s, rel=0.05)
    assert both == pytest.approx(message * 15 / 16 / 8 / road.between_bytes_per_s, rel=0.1)
    assert lonely == pytest.approx(message / 2 / road.between_bytes_per_s, rel=0.05)
    assert collective_s(road, "reduce", message, 1, 1) == 0


def test_a_wave_that_is_not_full_costs_as_much_as_a_full_one():
    a100 = read_cluster("8xA100-80GB").islands[0].device
    rates = device_rates(a100, "bf16", PLAIT_PROFILE)
    one_wave = product_s(rates, 256 * 108, 4096, 128, flops=rates.linear_flops)
    one_more = product_s(rates, 256 * 109, 4096, 128, flops=rates.linear_flops)
    assert one_more > 1.1 * one_wave
    best = 2 * 8192**3 / product_s(rates, 8192, 8192, 8192, flops=rates.linear_flops)
    assert 0.75 * rates.linear_flops < best <= rates.linear_flops


def test_small_models_are_bound_by_the_host():
    tiny = replace(LLAMA_70B, layers=12, width=512, heads=8, kv_heads=8, head_width=64, ffn=1024, sequence=128)
    priced = estimate_step_time(
        inputs(tiny, H100, Candidates.from_rows([{"shard": 64, "micro_sequences": 1}]), PLAIT_PROFILE)
    )
    assert priced.host[0] > 0.5 * priced.step_s[0]


def test_every_layout_of_a_large_model_is_priced_within_a_second():
    rows = [
        {"pipeline": p, "tensor": t, "context": c, "shard": 16384 // (p * t * c), "recompute": r, "micro_sequences": m}
        for p in (1, 2, 4, 8, 16, 32)
        for t in (1, 2, 4, 8, 16)
        for c in (1, 2, 4, 8)
        for r in ("none", "selective", "full")
        for m in (1, 2, 4, 8)
    ]
    table = Candidates.from_rows(rows * 8)
    work = replace(LLAMA_70B, layers=126, width=16384, heads=128, ffn=53248, batch_sequences=2048)
    start = time.perf_counter()
    assert np.isfinite(estimate_step_time(inputs(work, read_cluster("16384xH100"), table, PLAIT_PROFILE)).step_s).all()
    assert time.perf_counter() - start < 2.0  # 11,520 of them; about half a second on an idle core


def test_an_island_with_a_network_of_its_own_is_priced_by_it():
    slow, fast = link_at_rate(10, "device"), link_at_rate(400, "device")
    island = replace(H100.islands[0], nodes=2)
    alone = replace(H100, islands=(replace(island, network=slow),), between=fast)
    assert network_of(alone).between_bytes_per_s == network_of(replace(H100, between=slow)).between_bytes_per_s
    # Two islands wait for the slowest of all that lies between their nodes; one node needs no network within.
    two = replace(alone, islands=(replace(island, network=fast), replace(island, network=fast)), between=slow)
    assert network_of(two).between_bytes_per_s == network_of(alone).between_bytes_per_s
    single = replace(H100, islands=(replace(island, nodes=1, network=slow), replace(island, nodes=1)), between=fast)
    assert network_of(single).between_bytes_per_s == network_of(replace(H100, between=fast)).between_bytes_per_s


def test_launches_that_block_cost_all_of_the_hosts_time():
    table = Candidates.from_rows([{"tensor": 8, "micro_sequences": micros} for micros in (1, 4)])
    ahead, blocking = (
        estimate_step_time(inputs(LLAMA_70B, H100, table, replace(PLAIT_PROFILE, launch_mode=mode)))
        for mode in ("ahead", "blocking")
    )
    extra = blocking.step_s - ahead.step_s
    assert (extra > 0).all()
    assert extra[0] == pytest.approx(4 * extra[1], rel=0.1)  # four times as many micro-batches


def test_a_masked_softmax_that_does_not_apply_launches_more():
    small = replace(LLAMA_70B, width=1024, heads=16, kv_heads=16, head_width=64, sequence=1024, attention="unfused")
    table = Candidates.from_rows([{"tensor": 8, "micro_sequences": micros} for micros in (1, 2)])
    one, two = estimate_step_time(inputs(small, H100, table, MEGATRON)).host
    assert one > 2.5 * two  # two matrices a rank in place of four, and twice as many micro-batches


def test_a_rank_between_two_others_waits_for_four_messages_one_at_a_time():
    table = Candidates.from_rows(
        [{"pipeline": ranks, "tensor": 8, "replicate": 8 // ranks, "schedule": "1f1b"} for ranks in (2, 4)]
    )
    one_by_one = replace(MEGATRON, other=replace(MEGATRON.other, sends_one_at_a_time=True))
    even = replace(LLAMA_70B, vocabulary=512)  # else the last rank, with the head, sets the pace
    both_ways, waiting = (
        estimate_step_time(inputs(even, H100, table, profile)).passes for profile in (MEGATRON, one_by_one)
    )
    assert waiting[0] == both_ways[0]
    assert (
        1.5 * both_ways[1] < waiting[1] <= 2 * both_ways[1]
    )  # two ranks are at the ends, and one of them has the head


def test_the_backward_pass_over_scores_takes_the_program_s_own_traffic():
    unfused = replace(LLAMA_70B, attention="unfused")
    once, twice = (
        estimate_step_time(
            inputs(unfused, H100, Candidates.from_rows([{"tensor": 8}]), replace(MEGATRON, other=other))
        ).scores[0]
        for other in (replace(MEGATRON.other, scores_backward=0.0), replace(MEGATRON.other, scores_backward=10.0))
    )
    assert twice > 2 * once


def test_ranks_of_one_sequence_add_up_what_they_hold_whole():
    table = Candidates.from_rows([{"shard": 8, "context": 8, "shard_what": "optimizer"}])
    own, both = (
        estimate_step_time(
            inputs(LLAMA_70B, H100, table, replace(PLAIT_PROFILE, shards_over=over, hides_gradients=0.0))
        )
        for over in ("shard", "shard and context")
    )
    assert own.gradients[0] > 1.2 * both.gradients[0]
    assert own.optimizer[0] - PLAIT_PROFILE.step_s == pytest.approx(8 * (both.optimizer[0] - PLAIT_PROFILE.step_s))
