"""Where a probe has been, the planner answers by its times, and what was timed goes before the catalogue."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plait.machines.catalog import link_at_rate
from plait.machines.cluster import Cluster, cluster_from_json, cluster_json, cluster_of_hosts, read_cluster
from plait.machines.machine import Machine
from plait.machines.measured import CommOperation, MeasuredOverlap, Measurements
from plait.model.shape import ModelShape
from plait.model.sizes import explicit_shape
from plait.partition.pipeline_simulation import ActionTimes, durations_s
from plait.planner.problem.candidates import Candidates, Reals
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.search import enumeration
from plait.planner.search.search import search
from plait.planner.step_time.measured_network import slowest_measured_link, slowest_send_bytes_per_s
from plait.planner.step_time.step_time import StepTime, estimate_step_time
from tests.planner.cost_inputs import inputs
from tests.probing.probed import device, link, measured, point, timed

RATE = 1e8
"""Bytes a second of the measured cable."""
KINDS: tuple[CommOperation, ...] = (
    "send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "swap_parts", "spread_own",
)  # fmt: skip
HOST = Machine(device="cpu", name="a processor", devices=1, cores=4, memory_bytes=2**34, versions=())
SHAPE: ModelShape = explicit_shape(layers=8, width=256, heads=4, vocabulary=2048, sequence=256)


def told(product_s: float = 0.01, rate: float = RATE, hidden_s: float = 0.0) -> Measurements:
    """Two hosts: products of a second's share, a cable on which every operation on n bytes takes n / rate."""
    products = [timed(work, (1024, 256, 256), product_s) for work in ("product", "product_input", "product_weight")]
    links = [link(kind, *(point(2**k, 1e-4 + 2**k / rate) for k in (10, 20, 26)), scope="between") for kind in KINDS]
    overlap = MeasuredOverlap(
        scope="between", ranks=2, bytes=2**20, compute_s=1.0, communicate_s=0.5, both_s=1.5 - hidden_s
    )
    devices = tuple(replace(device(*products, host=host), workers=1) for host in ("a", "b"))
    return replace(measured(*links, devices=devices), workers=2, overlaps=(overlap,))


def cluster(found: Measurements) -> Cluster:
    return replace(cluster_of_hosts([(HOST, 1e11, 1)] * 2, slowest_measured_link(found, "between")), measured=found)


def work(batch: int = 16) -> Workload:
    return workload_of(SHAPE, sequence=256, batch_sequences=batch, precision="float32")


def priced(found: Measurements, **row: int | str) -> StepTime:
    asked = Candidates.from_rows([{"micro_sequences": 4, **row}], "balanced")
    return estimate_step_time(inputs(work(), cluster(found), asked, PLAIT_PROFILE.for_cluster(cluster(found))))


def test_an_update_with_fewer_moments_moves_less_memory_on_measured_and_known_devices() -> None:
    row = Candidates.from_rows([{"micro_sequences": 4, "replicate": 2}], "balanced")
    for where in (cluster(told()), read_cluster("2xH100")):
        profile = replace(PLAIT_PROFILE, step_s=0.0).for_cluster(where)
        adamw, momentum, plain = (
            estimate_step_time(inputs(replace(work(), moments=moments), where, row, profile)).optimizer[0]
            for moments in (2, 1, 0)
        )
        assert momentum / adamw == pytest.approx(22 / 30) and plain / adamw == pytest.approx(14 / 30)


def test_products_take_what_the_probe_timed() -> None:
    one, two = priced(told(0.01), replicate=2), priced(told(0.02), replicate=2)
    assert two.products[0] == pytest.approx(2 * one.products[0])
    assert two.gradients[0] == one.gradients[0] and one.host[0] == 0


def test_messages_take_what_the_probe_timed_and_arithmetic_hides_what_it_did_there() -> None:
    bare, hidden = priced(told(), replicate=2), priced(told(hidden_s=0.25), replicate=2)
    weights = 8 * (4 * 256 * 256 + 3 * 256 * SHAPE.ffn) + 2048 * 256
    assert bare.gradients[0] == pytest.approx(4 * weights / RATE, rel=0.05)
    assert hidden.gradients[0] == pytest.approx(bare.gradients[0] / 2, rel=0.05)


def test_a_narrower_cable_than_the_measured_one_is_that_much_slower() -> None:
    found = told()
    slower = replace(cluster(found), between=replace(slowest_measured_link(found, "between"), bytes_per_s=RATE / 4))
    row = Candidates.from_rows([{"micro_sequences": 4, "replicate": 2}], "balanced")
    there, here = (
        estimate_step_time(inputs(work(), c, row, PLAIT_PROFILE.for_cluster(c))).gradients[0]
        for c in (slower, cluster(found))
    )
    assert there == pytest.approx(4 * here, rel=0.02)
    assert slowest_send_bytes_per_s(found, "between") == pytest.approx(RATE, rel=0.01)


def test_what_was_not_timed_is_asked_of_the_catalogue() -> None:
    """One worker a host: nothing was timed inside a host, and a layout over two workers of one is still priced."""
    found = told()
    wide = replace(cluster(found), islands=cluster_of_hosts([(HOST, 1e11, 2)], link_at_rate(1, "machine")).islands)
    row = Candidates.from_rows([{"micro_sequences": 4, "replicate": 2}], "balanced")
    assert np.isfinite(estimate_step_time(inputs(work(), wide, row, PLAIT_PROFILE.for_cluster(wide))).step_s).all()


def test_a_fast_cable_keeps_copies_and_a_slow_one_asks_for_a_pipeline() -> None:
    fast, slow = (search(work(), cluster(told(0.002, rate))) for rate in (3e9, 3e6))
    assert fast.candidates.row(fast.chosen)["pipeline"] == 1
    assert slow.candidates.row(slow.chosen)["pipeline"] == 2
    assert fast.tolerance == 0.05, "measured machines are known better than the catalogue's"


def test_another_precision_than_the_probes_is_not_answered_by_it() -> None:
    found = told()
    row = Candidates.from_rows([{"micro_sequences": 4, "replicate": 2}], "balanced")
    asked = replace(work(), precision="bf16")
    one, two = (
        estimate_step_time(inputs(asked, cluster(told(s)), row, PLAIT_PROFILE.for_cluster(cluster(found))))
        for s in (0.01, 0.02)
    )
    assert one.products[0] == two.products[0]


def test_what_a_probe_wrote_reads_back() -> None:
    there = cluster(told())
    assert cluster_from_json(cluster_json(there), "cluster.json") == there


def test_messages_that_arrive_later_delay_whoever_waits() -> None:
    """Two ranks, 1f1b: one micro-batch passes there and back; of many the round trip binds, two being under way."""
    each: Reals = np.full((2, 1), 1.0)
    spent: ActionTimes = {"forward": each, "backward-input": each, "backward-weight": 0 * each}

    def whole(micros: int, sent_s: float) -> float:
        return float(durations_s("1f1b", (2, 1, micros), spent, np.array([sent_s]))[0])

    assert whole(1, 0.0) == 4 and whole(1, 0.5) == 5
    assert whole(1, 0.5) == durations_s("1f1b", (2, 1, 1), spent, 0.5)[0]
    per_micro = (whole(40, 1.0) - whole(20, 1.0)) / 20
    assert per_micro == pytest.approx((4 + 2) / 2)
    assert (whole(40, 0.0) - whole(20, 0.0)) / 20 == pytest.approx(2)


def test_messages_of_a_slow_wire_queue() -> None:
    """GPipe, four micro-batches of a second each way, messages of three: they leave one after the other."""
    each: Reals = np.full((2, 1), 1.0)
    spent: ActionTimes = {"forward": each, "backward-input": each, "backward-weight": 0 * each}
    # Forward results arrive at 4, 7, 10, 13; gradients leave from 15 on, and arrive at 18, 21, 24, 27.
    assert durations_s("gpipe", (2, 1, 4), spent, 3.0)[0] == 28


def test_gpipe_is_thought_of_where_messages_were_timed() -> None:
    """With every micro-batch under way, nobody waits for a round trip over a slow cable."""
    found = search(work(), cluster(told(rate=RATE / 400)))
    assert "gpipe" in {str(found.candidates.row(i)["schedule"]) for i in range(len(found.candidates))}
    assert enumeration.GPIPE_NEEDLESS not in found.refused


def test_what_messages_cost_the_processor_adds_to_a_stage_s_work() -> None:
    free, dear = told(), told()
    dear = replace(
        dear, links=tuple(replace(one, points=tuple(replace(p, cpu_s=0.01) for p in one.points)) for one in dear.links)
    )
    free = replace(
        free, links=tuple(replace(one, points=tuple(replace(p, cpu_s=0.0) for p in one.points)) for one in free.links)
    )
    row: dict[str, int | str] = {"pipeline": 2, "micro_sequences": 4}
    without, with_them = (float(priced(found, **row).host[0]) for found in (free, dear))
    assert with_them - without == pytest.approx(4 * 2 * 0.01), "four micro-batches, one message there and one back"


def test_ends_that_are_alone_wait_for_one_micro_batch_s_rows_only() -> None:
    found = told(rate=RATE / 20)
    row: dict[str, int | str] = {"pipeline": 2, "schedule": "gpipe"}
    tied, many, once = (float(priced(found, **row, micro_sequences=micro).gradients[0]) for micro in (2, 1, 16))
    assert many < tied < once, "the fewer tokens a micro-batch has, the fewer rows are left for the end"
    rows = 144  # of 2,048 kinds among 256 tokens: see workload.distinct_tokens
    assert many == pytest.approx(2 * (1e-4 + rows * 256 * 4 / (RATE / 20)), rel=0.15), "rows there, gradients back"
