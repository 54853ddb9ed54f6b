"""Bytes of the all-to-all by link, loads of a group's busiest rank, and who holds which experts, by hand arithmetic."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import sqrt
from statistics import pstdev

import numpy as np
import pytest

from plait.machines.cluster import read_cluster
from plait.planner.memory.estimate import estimate_memory
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.expert_loads import busiest_rank_load
from plait.planner.problem.software_profile import PLAIT_PROFILE, SoftwareProfile
from plait.planner.problem.stage_partition import expert_shard_ranks
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.expert_traffic import (
    expert_all_to_all_s,
    expert_traffic,
    most_nodes_met,
    nodes_met,
)
from plait.planner.step_time.network_model import network_of
from plait.planner.step_time.step_time import estimate_step_time
from tests.model.test_latent_attention import published

V3 = workload_of(published("deepseek-v3"), sequence=4096, batch_sequences=15360)
H100 = read_cluster("2048xH100+400G")
EP64 = Candidates.from_rows([{"pipeline": 16, "replicate": 128, "expert": 64}])
"""DeepSeek-V3's own layout: 16 stages, experts of a layer on 64 GPUs of 8 nodes (2412.19437, section 3.2)."""
DEEPEP = replace(PLAIT_PROFILE, expert_sends="once a node")
COPY = 4096 * 7168 * 2
"""Bytes of one copy of a micro-batch's tokens."""


def test_each_token_travels_once_for_each_of_its_experts() -> None:
    sent = expert_traffic(network_of(H100), V3, EP64, PLAIT_PROFILE)
    # Of 64 ranks, 7 others are in the node, and 56 in other nodes; 8 experts a token.
    assert sent.inside[0] == pytest.approx(COPY * 8 * 7 / 64)
    assert sent.between[0] == pytest.approx(COPY * 8 * 56 / 64)


def test_node_limited_routing_sends_a_token_to_four_nodes_at_most() -> None:
    sent = expert_traffic(network_of(H100), V3, EP64, DEEPEP)
    # 4 of 8 nodes are open to a token; one of those that are gets none of its 8 experts with (3/4)^8.
    met = 4 * (1 - (3 / 4) ** 8)
    assert (float(nodes_met(V3, 8)), most_nodes_met(V3, 8)) == (pytest.approx(met), 4)
    assert sent.between[0] == pytest.approx(COPY * met * 7 / 8)
    assert sent.inside[0] == pytest.approx(COPY * 8 * 7 / 8)
    free = replace(V3, expert_groups=1, expert_groups_chosen=1)
    assert nodes_met(free, 8) == pytest.approx(8 * (1 - (7 / 8) ** 8)) and most_nodes_met(free, 8) == 8


@pytest.mark.parametrize("nodes", [2, 4, 8, 16, 32])
def test_nodes_met_are_those_of_routed_tokens(nodes: int) -> None:
    random, met = np.random.default_rng(0), []
    for _ in range(1000):
        open_groups = random.choice(8, 4, replace=False)
        experts = random.choice(np.concatenate([np.arange(32) + 32 * group for group in open_groups]), 8, replace=False)
        met.append(len(set(experts // (256 // nodes))))
    assert float(nodes_met(V3, nodes)) == pytest.approx(np.mean(met), rel=0.06)
    assert max(met) <= most_nodes_met(V3, nodes)


def test_a_torus_carries_less_of_an_all_to_all_than_of_a_ring() -> None:
    slice_ = read_cluster("256xTPUv5p")
    network, inner = network_of(slice_), 90e9 * 2 * 3 * slice_.islands[0].inside.reached
    assert network.inside_bytes_per_s == pytest.approx(inner)
    for ranks, share in ((8, 8 / 2 / 6), (64, 8 / 4 / 6)):  # cubes of 2 and of 4
        one = Candidates.from_rows([{"replicate": 256, "expert": ranks}])
        even = replace(V3, expert_load=1.0)
        inside, between = expert_all_to_all_s(network, even, one, PLAIT_PROFILE)
        sent = COPY * 8 * (ranks - 1) / ranks
        assert inside[0] == pytest.approx(sent / (inner * share) + (ranks - 1) * network.inside_latency_s)
        assert between[0] == pytest.approx(0, abs=1e-3)


def test_the_busiest_ranks_load_is_that_of_a_sample_of_experts() -> None:
    loads = np.array([1.0, 3.0, 0.5, 0.5, 2.0, 0.0, 0.5, 0.5])
    for held in (1, 2, 4, 8):
        sums = [np.mean(some) for some in combinations(loads, held)]
        assert pstdev(sums) == pytest.approx(np.std(loads) * sqrt((8 - held) / (held * 7)))


def test_loads_even_out_over_the_experts_of_a_rank() -> None:
    row = [{"replicate": 256, "expert": degree} for degree in (1, 64, 256)]
    uneven = replace(V3, expert_load=1.25)
    assert busiest_rank_load(uneven, Candidates.from_rows(row)).tolist() == [
        1.0,
        pytest.approx(1 + 0.25 * sqrt(252 / (4 * 255))),  # 4 of 256 experts on a rank
        pytest.approx(1.25),
    ]
    # A rank cannot get more than all tokens: twice the mean of two ranks.
    few = replace(V3, experts=8, experts_per_token=2, expert_load=4.0)
    assert busiest_rank_load(few, Candidates.from_rows([{"replicate": 2, "expert": 2}]))[0] == 2.0


def priced(w: Workload, rows: list[dict[str, int | str]], profile: SoftwareProfile = PLAIT_PROFILE) -> CostInputs:
    return CostInputs(workload=w, cluster=H100, candidates=Candidates.from_rows(rows), profile=profile)


def test_unequal_loads_cost_time_and_memory() -> None:
    rows = [{"pipeline": 16, "replicate": 128, "expert": 64}]
    even, uneven = (priced(replace(V3, expert_load=load), rows) for load in (1.0, 1.25))
    there, here = (estimate_step_time(one) for one in (uneven, even))
    load = float(busiest_rank_load(uneven.workload, uneven.candidates)[0])
    assert there.products[0] > 1.03 * here.products[0]
    assert there.experts[0] == pytest.approx(load * here.experts[0], rel=0.01)
    more, less = (estimate_memory(one.workload, one.candidates, PLAIT_PROFILE) for one in (uneven, even))
    assert more.activations[0] > 1.04 * less.activations[0]  # latent attention keeps more than half of all
    assert more.parameters[0] == less.parameters[0]


def test_experts_that_ranks_share_out_are_sharded_over_fewer_of_them() -> None:
    rows = [{"shard": 256, "shard_what": "parameters", "expert": degree} for degree in (1, 64, 256)]
    c = Candidates.from_rows(rows)
    assert expert_shard_ranks(V3, c, c.shard).tolist() == [256, 4, 1]
    held = estimate_memory(replace(V3, expert_load=1.0), c, PLAIT_PROFILE)
    # 1/64 of the experts, each of which 4 ranks share, are as many numbers as 1/256 of all.
    assert held.optimizer == pytest.approx([held.optimizer[0]] * 3)
    assert held.gradients == pytest.approx([held.gradients[0]] * 3)
    assert held.gathered[0] > 4 * held.gathered[1] > 0
    states = (held.parameters + held.gradients + held.optimizer)[0]
    assert states == pytest.approx(671e9 * 16 / 256, rel=0.01)  # weights, gradients, two moments in float32


def test_ranks_of_the_context_axis_take_experts_first() -> None:
    c = Candidates.from_rows([{"shard": 4, "context": 2, "expert": degree} for degree in (1, 2, 4, 8)])
    assert expert_shard_ranks(V3, c, c.shard).tolist() == [4, 4, 2, 1]


def test_gradients_of_shared_out_experts_are_summed_over_fewer_ranks() -> None:
    rows: list[dict[str, int | str]] = [{"pipeline": 16, "replicate": 128, "expert": degree} for degree in (1, 64)]
    times = estimate_step_time(priced(replace(V3, expert_load=1.0), rows))
    assert times.gradients[1] < 0.1 * times.gradients[0]
