"""Is what stays on an island priced by the island's own network, and what leaves it by the link between them?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.layout import Layout
from plait.machines.catalog import find_link, link_at_rate
from plait.machines.cluster import Cluster, Island, read_cluster
from plait.planner.explain.choice import island_traffic_lines
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.problem.workload import Workload
from plait.planner.search.enumeration import Constraints
from plait.planner.search.search import search
from plait.planner.step_time.network_model import collective_s, network_of, stage_message_s
from plait.planner.step_time.stage_messages import hop_shares
from plait.planner.step_time.step_time import StepTime, estimate_step_time
from tests.planner.cost_inputs import inputs

WORK = Workload(
    layers=32, width=4096, heads=32, kv_heads=8, head_width=128, ffn=14336, gated=True, vocabulary=32000, tied=False,
    sequence=4096, batch_sequences=256,
)  # fmt: skip
[NODES] = read_cluster("32xH100").islands


def zones(gbit_per_s: float, *nodes: int) -> Cluster:
    """Zones of so many nodes with InfiniBand inside each, joined at a rate for each device."""
    islands: list[Island] = [replace(NODES, nodes=n, network=find_link("infiniband-ndr")) for n in nodes]
    return Cluster(name="zones", islands=tuple(islands), between=link_at_rate(gbit_per_s, "device"))


def priced(cluster: Cluster, **knobs: int | str) -> StepTime:
    return estimate_step_time(inputs(WORK, cluster, Candidates.from_rows([knobs]), PLAIT_PROFILE))


def test_copies_inside_an_island_sum_over_its_own_network() -> None:
    across = {"pipeline": 2, "shard": 16, "shard_what": "optimizer"}
    wide, narrow = (priced(zones(gbit, 2, 2), **across) for gbit in (48, 0.8))
    assert narrow.gradients == pytest.approx(wide.gradients)
    assert narrow.parameters == pytest.approx(wide.parameters)
    assert narrow.passes > 10 * wide.passes  # what stages hand over does cross


def test_copies_on_both_islands_wait_for_the_link_between_them() -> None:
    copies = {"replicate": 2, "shard": 16, "shard_what": "parameters"}
    wide, narrow = (priced(zones(gbit, 2, 2), **copies) for gbit in (48, 0.8))
    assert narrow.gradients > 10 * wide.gradients
    assert narrow.parameters == pytest.approx(wide.parameters)  # gathered within


def test_groups_that_straddle_islands_of_unequal_size_cross() -> None:
    network = network_of(zones(0.8, 1, 3))
    assert network.spans_islands(8, 1).item() is False
    assert network.spans_islands(16, 1).item() is True
    assert collective_s(network, "gather", 1e9, 16, 1) > 10 * collective_s(network, "gather", 1e9, 8, 1)


def test_a_stage_of_a_pipeline_that_holds_ranks_of_two_islands_sums_over_the_link_between_them() -> None:
    """Of 16 and 12 devices: halves of 14 straddle the border, seven stages of 4 do not."""
    [fours] = read_cluster("3x(4xH100)+400G").islands
    eights, fours = (
        replace(island, network=find_link("infiniband-ndr")) for island in (replace(NODES, nodes=2), fours)
    )
    unequal = [replace(zones(gbit, 1), islands=(eights, fours)) for gbit in (48, 0.8)]
    halves = [priced(c, pipeline=2, shard=14, shard_what="optimizer").gradients for c in unequal]
    sevenths = [priced(c, pipeline=7, shard=4, shard_what="optimizer").gradients for c in unequal]
    assert halves[1] > 10 * halves[0]
    assert sevenths[1] == pytest.approx(sevenths[0])


def test_one_hop_of_a_pipeline_crosses_and_the_others_do_not() -> None:
    def shares(cluster: Cluster, virtual: int = 1) -> list[float]:
        table = Candidates.from_rows([{"pipeline": 4, "virtual": virtual, "shard": 8}])
        return [float(share) for share in hop_shares(inputs(WORK, cluster, table, PLAIT_PROFILE))[:, 0]]

    assert shares(read_cluster("32xH100")) == [1.0] * 4
    own, slow, *rest = shares(zones(0.8, 2, 2))
    assert (slow, rest) == (1.0, [own] * 2)
    assert own < 0.1
    assert shares(zones(0.8, 2, 2), 2)[-1] == 1.0  # the last stage of a round sends to the first of the next


def test_a_pipeline_with_several_stages_in_a_node_still_leaves_it() -> None:
    two = network_of(read_cluster("2x(8xH100)+10G"))
    assert stage_message_s(two, 1e8, 4, 4) == pytest.approx(stage_message_s(two, 1e8, 2, 8))
    assert stage_message_s(two, 1e8, 2, 4) < 0.1 * stage_message_s(two, 1e8, 2, 8)  # both in one node


def test_of_a_shared_card_each_sender_has_a_part() -> None:
    office = network_of(read_cluster("2x(4x4090)@1G"))
    few, many = (float(stage_message_s(office, 1e8, 8 // stride, stride)) for stride in (2, 4))
    assert many == pytest.approx(2 * few, rel=0.01)


def test_a_pipeline_fills_over_the_hops_as_they_are() -> None:
    deep = {"pipeline": 4, "shard": 8, "shard_what": "optimizer"}
    narrow, everywhere = priced(zones(0.8, 2, 2), **deep), priced(zones(0.8, 1, 1, 1, 1), **deep)
    # The slowest hop sets the pace of either; in the first it is at a rank without the head.
    assert np.isclose(narrow.passes + narrow.head, everywhere.passes)
    assert narrow.bubble < 0.6 * everywhere.bubble


def test_the_plan_says_what_crosses() -> None:
    named = Constraints(degrees=Layout(pipeline=2, shard=16))
    found = search(WORK, zones(0.8, 2, 2), constraints=named)
    [line] = island_traffic_lines(found)
    assert line.startswith("results of pipeline stages cross from island to island")
    assert "gradients and parameters stay on each island's own network" in line
    assert island_traffic_lines(search(WORK, read_cluster("32xH100"))) == []
