"""What Muon's products and messages cost, and who computes for copies of a matrix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plait.commands.planning.plan_report import make_plan_report
from plait.machines.cluster import Cluster, read_cluster
from plait.model.names import is_hidden_matrix
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape, weight_sizes
from plait.partition.matrix_owners import orthogonalization_flops
from plait.planner.derive.resources import on_paper
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.problem.workload import Orthogonalization, Workload, workload_of
from plait.planner.step_time.cost_inputs import CostInputs
from plait.planner.step_time.orthogonalization import layer_matrices, orthogonalization_time
from plait.planner.step_time.step_time import estimate_step_time
from plait.units import format_bytes
from tests.planner.cost_inputs import inputs
from tests.planner.machines import recipe

SHAPE = ModelShape(
    layers=24, width=2048, heads=16, kv_heads=8, head_width=128, ffn=5504, vocabulary=32768, sequence=2048
)
MUON = Orthogonalization(number_bytes=2)


def work(shape: ModelShape = SHAPE) -> Workload:
    return replace(workload_of(shape, sequence=2048, batch_sequences=512, precision="bf16"), orthogonalization=MUON)


def priced(cluster: Cluster, *rows: dict[str, int | str], workload: Workload | None = None) -> CostInputs:
    asked = Candidates.from_rows([{"micro_sequences": 4, **row} for row in rows], "balanced")
    return inputs(workload or work(), cluster, asked, PLAIT_PROFILE.for_cluster(cluster))


@pytest.mark.parametrize("experts", [0, 8])
def test_the_matrices_of_an_average_layer_are_the_model_s(experts: int) -> None:
    mixture = MixtureShape(experts=8, experts_per_token=2, expert_ffn=1024, shared_experts=1, dense_layers=4)
    shape = replace(SHAPE, mixture=mixture if experts else None)
    found = sum(
        24 * number * orthogonalization_flops(one, other)
        for some in layer_matrices(work(shape))
        for one, other, number in some
    )
    wanted = sum(
        orthogonalization_flops(*sizes) for name, sizes in weight_sizes(shape).items() if is_hidden_matrix(name)
    )  # type: ignore[misc]
    assert found == pytest.approx(wanted)


def test_a_large_model_s_step_takes_little_longer_by_muon() -> None:
    """The issue's bar for 1B parameters on paper."""
    with_muon = priced(read_cluster("8xH100"), {"replicate": 8})
    adamw = replace(with_muon, workload=replace(with_muon.workload, orthogonalization=None))
    times = [estimate_step_time(one).step_s[0] for one in (with_muon, adamw)]
    assert 1.0 < times[0] / times[1] <= 1.05
    assert not orthogonalization_time(adamw).step_s.any()


def test_owners_divide_the_products_and_pay_for_messages() -> None:
    one, eight = (priced(read_cluster("8xH100"), {"replicate": n}) for n in (1, 8))
    alone, shared = orthogonalization_time(one), orthogonalization_time(eight)
    assert shared.one_for_all[0] > alone.one_for_all[0] / 8
    assert shared.each_for_itself[0] == pytest.approx(alone.each_for_itself[0]) == pytest.approx(alone.one_for_all[0])


def test_copies_over_a_slow_cable_compute_for_themselves_unless_they_differ() -> None:
    fast, slow = (
        orthogonalization_time(priced(read_cluster(words), {"replicate": 2})).copies_compute(0)
        for words in ("2xH100", "H100+H100@100M")
    )
    assert (fast, slow) == ("one for all", "each for itself")
    unlike = orthogonalization_time(priced(read_cluster("H100+A100@100M"), {"replicate": 2}))
    assert np.isinf(unlike.each_for_itself[0]) and unlike.copies_compute(0) == "one for all"


@pytest.mark.parametrize(
    "row", [{"shard": 2, "shard_what": "parameters"}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}]
)
def test_every_layout_has_a_price(row: dict[str, int | str]) -> None:
    found = orthogonalization_time(priced(read_cluster("2xH100"), row))
    assert np.isfinite(found.step_s[0]) and found.step_s[0] > 0


@pytest.mark.parametrize("words", ["8xH100", "1xH100"])
def test_a_plan_says_what_muon_is_what_it_costs_and_what_it_saves(words: str, tmp_path: Path) -> None:
    asked = ("model.size=1B", "train.budget=20B tokens", "model.vocabulary=50304")
    muon, adamw = (
        make_plan_report(recipe(tmp_path, *asked, *more), on_paper(read_cluster(words)), top=0)
        for more in (("optimizer.kind=muon",), ())
    )
    own = [reason for reason in muon.reasons if "Muon" in reason]
    assert not any("Muon" in reason for reason in adamw.reasons)
    assert any("each orthogonalized as a whole (Jordan 2024)" in reason for reason in own)
    assert any("less held-out loss than AdamW" in reason for reason in own)
    (spent,) = [reason for reason in own if reason.startswith("Muon's products and messages take")]
    assert ("one device orthogonalizes each matrix" in spent) == (words == "8xH100")
    (state,) = [reason for reason in own if reason.startswith("optimizer state takes")]
    assert format_bytes(muon.memory["optimizer"]) in state and format_bytes(adamw.memory["optimizer"]) in state
    assert muon.memory["optimizer"] < 0.7 * adamw.memory["optimizer"]
