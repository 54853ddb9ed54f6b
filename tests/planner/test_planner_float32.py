"""Is float32 priced by the arithmetic that GPUs have for it, and does the plan say and carry what products run in?"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait.errors import PlaitError
from plait.machines.cluster import Cluster, read_cluster
from plait.machines.machine import Machine
from plait.planner.derive.resources import ProbeNeed, Resources, on_paper
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan, write_plan
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.program_profiles import MEGATRON_DEEPSPEED
from plait.planner.problem.software_profile import PLAIT_PROFILE
from plait.planner.problem.workload import PricedPrecision, Workload
from plait.planner.resolve.resolve import draft
from plait.planner.step_time.device_rates import device_rates
from plait.planner.step_time.device_time import device_time_of
from plait.planner.step_time.roofline import product_s
from plait.trainer.worker import select_matmul_precision
from tests.planner.machines import WEB, recipe

SMALL = ("model.size=125M", "train.sequence=1024", "train.batch_tokens=65536", "train.budget=1000 steps")
OPT_350M = Workload(
    layers=24, width=1024, heads=16, kv_heads=16, head_width=64, ffn=4096, gated=False, vocabulary=50272, tied=True,
    sequence=2048, batch_sequences=1024, attention="unfused",
)  # fmt: skip


def planned_on(folder: Path, cluster: str, *asked: str) -> Plan:
    resources = on_paper(read_cluster(cluster))
    return draft(recipe(folder, *SMALL, *asked), WEB, resources, recipe_hash="cafe").plan


def layer_s(cluster: str, precision: PricedPrecision) -> float:
    device = device_time_of(replace(OPT_350M, precision=precision), read_cluster(cluster), MEGATRON_DEEPSPEED)
    layer = device.layer_time(Candidates.from_rows([{"micro_sequences": 4}]))
    return float((layer.forward + layer.backward)[0])


def test_float32_products_run_in_tf32_where_there_is_such_arithmetic(tmp_path: Path) -> None:
    plan = planned_on(tmp_path, "8xA100", "train.precision=float32")
    assert (
        plan.arithmetic.precision,
        plan.arithmetic.matmul_precision,
        plan.execution.arithmetic.matmul_precision,
    ) == (
        "float32",
        "tf32",
        "tf32",
    )
    assert any("products in TF32" in reason and "8 times the peak" in reason for reason in plan.reasons)
    exact = replace(plan, arithmetic=replace(plan.arithmetic, matmul_precision="float32"))
    assert plan.forecast is not None and exact.execution.arithmetic.matmul_precision == "float32"


@pytest.mark.parametrize("cluster", ["8xV100-32GB", "8xMI300X"])
def test_where_there_is_none_they_stay_in_float32(tmp_path: Path, cluster: str) -> None:
    assert planned_on(tmp_path, cluster, "train.precision=float32").arithmetic.matmul_precision == "float32"


@pytest.mark.parametrize(("cluster", "gain"), [("8xV100-32GB", 8), ("8xT4", 8), ("2x2080Ti", 4)])
def test_a_device_without_bf16_trains_in_float32_and_says_what_fp16_would_give(
    tmp_path: Path, cluster: str, gain: int
) -> None:
    plan, half = planned_on(tmp_path, cluster), planned_on(tmp_path, cluster, "train.precision=fp16")
    [device] = {island.device for island in read_cluster(cluster).islands}
    assert plan.arithmetic.precision == "float32"
    [reason] = [one for one in plan.reasons if one.startswith("precision float32: ")]
    assert f'{device.name} has no bf16 arithmetic; train.precision = "fp16" has {gain} times the peak' in reason
    assert plan.machines.peak_flops == pytest.approx(plan.world_size * device.flops("float32"))
    assert half.arithmetic.precision == "fp16"
    assert any(one.startswith("precision fp16 with ") and "not yet on a GPU" in one for one in half.reasons)
    assert half.machines.peak_flops == pytest.approx(half.world_size * device.flops("fp16"))
    assert plan.forecast is not None and half.forecast is not None
    assert half.forecast.step_s < 0.6 * plan.forecast.step_s
    message = rf'{device.name} has no bf16 arithmetic; write train.precision = "fp16" or "float32"'
    with pytest.raises(PlaitError, match=message):
        planned_on(tmp_path, cluster, "train.precision=bf16")
    assert planned_on(tmp_path, "8xA100").arithmetic.precision == "bf16"


def test_muon_orthogonalizes_in_float32_beside_fp16_and_is_priced_so(tmp_path: Path) -> None:
    asked = ("optimizer.kind=muon", "train.precision=fp16")
    plan = planned_on(tmp_path, "8xV100-32GB", *asked)
    assert (plan.arithmetic.precision, plan.arithmetic.orthogonalization_precision) == ("fp16", "float32")
    resources = on_paper(read_cluster("8xV100-32GB"))
    request = draft(recipe(tmp_path, *SMALL, *asked), WEB, resources, recipe_hash="").request
    assert request.workload.orthogonalization is not None
    assert request.workload.orthogonalization.speed == pytest.approx(15.7 / 125)


def test_a_plan_of_unlike_devices_says_which_of_them_keeps_all_from_tf32(tmp_path: Path) -> None:
    plan = planned_on(tmp_path, "8xA100+8xV100", "layout.replicate=16", "train.precision=float32")
    assert plan.arithmetic.matmul_precision == "float32"
    assert any("products in float32 on all devices: V100 SXM2 has no TF32, though A100" in one for one in plan.reasons)


def test_before_tensor_cores_there_is_no_fp16_either(tmp_path: Path) -> None:
    pascal = Machine(
        device="cuda", name="NVIDIA GeForce GTX 1080", devices=1, cores=4, memory_bytes=8 * 10**9, versions=(),
        without=("bf16", "fp16"),
    )  # fmt: skip
    resources = Resources(machine=pascal, peak_flops=9e12)
    plan = draft(recipe(tmp_path, *SMALL), WEB, resources, recipe_hash="cafe").plan
    assert plan.arithmetic.precision == "float32"
    assert "precision float32: NVIDIA GeForce GTX 1080 has no bf16 arithmetic" in plan.reasons
    with pytest.raises(PlaitError, match=r'GTX 1080 has no fp16 arithmetic; write train.precision = "float32"'):
        draft(recipe(tmp_path, *SMALL, "train.precision=fp16"), WEB, resources, recipe_hash="cafe")


@pytest.mark.parametrize(
    ("cluster", "part"), [("4090+T4@10G", "4090"), ("T4+4090@10G", "4090"), ("8xA100+24xV100", "8xA100")]
)
def test_a_device_without_bf16_does_not_keep_the_others_from_it(tmp_path: Path, cluster: str, part: str) -> None:
    plan, alone = planned_on(tmp_path, cluster), planned_on(tmp_path, part)
    assert plan.arithmetic == alone.arithmetic and plan.arithmetic.precision == "bf16"
    assert plan.placement.layout.world_size == alone.placement.layout.world_size
    assert plan.forecast is not None and alone.forecast is not None
    assert plan.forecast.step_s == pytest.approx(alone.forecast.step_s, rel=0.05)
    assert plan.machines.peak_flops == alone.machines.peak_flops
    assert not any("float32: " in reason for reason in plan.reasons)


def test_all_of_them_compute_in_float32_where_that_is_faster_or_named(tmp_path: Path) -> None:
    slow, fast = "rtx 3060+32xT4@100G", "4090+T4@10G"
    assert planned_on(tmp_path, slow).placement.layout.world_size == 32  # the T4s without the 3060
    assert planned_on(tmp_path, slow).arithmetic.precision == "float32"
    assert planned_on(tmp_path, fast, "train.precision=float32").arithmetic.precision == "float32"
    both = planned_on(tmp_path, fast, "layout.replicate=2")
    assert (both.arithmetic.precision, both.placement.layout.replicate) == ("float32", 2)


def test_why_it_is_left_out_names_its_precision(tmp_path: Path) -> None:
    resources = on_paper(read_cluster("4090+T4@10G"))
    drafted = draft(recipe(tmp_path, *SMALL), WEB, resources, recipe_hash="cafe")
    reasons = " ".join(drafted.layouts[0].reasons)
    assert "in float32, because T4 cannot compute in bf16" in reasons


@pytest.mark.parametrize("first_has_it", [True, False])
def test_among_hosts_the_one_that_leads_the_run_stays(tmp_path: Path, *, first_has_it: bool) -> None:
    ada = Machine(
        device="cuda", name="NVIDIA GeForce RTX 4090", devices=1, cores=16, memory_bytes=24 * 10**9, versions=()
    )
    turing = replace(ada, name="Tesla T4", memory_bytes=16 * 10**9, without=("bf16",))
    machines = (ada, turing) if first_has_it else (turing, ada)
    cluster = read_cluster("4090+T4@10G" if first_has_it else "T4+4090@10G")
    asked: list[ProbeNeed] = []

    def probe(need: ProbeNeed) -> Cluster:
        asked.append(need)
        return cluster

    resources = Resources(machine=machines[0], others=machines[1:], peak_flops=90e12, probe=probe)
    plan = draft(recipe(tmp_path, *SMALL), WEB, resources, recipe_hash="cafe").plan
    assert plan.arithmetic.precision == ("bf16" if first_has_it else "float32")
    if first_has_it:
        assert (plan.placement.layout.world_size, plan.placement.host_order) == (1, (0,))
    assert {need.precision for need in asked} == {"float32"}  # what all hosts can be asked to measure


def test_a_layer_in_float32_costs_about_what_was_measured() -> None:
    """Sailor's layer profiles: an A100 without TF32 takes 2.6 times as long as with it, a V100 3.2 times."""
    fast, plain, old = layer_s("1xA100-40GB", "tf32"), layer_s("1xA100-40GB", "float32"), layer_s("1xV100", "float32")
    assert 2.0 < plain / fast < 4.0
    assert 2.5 < old / fast < 5.5  # float32 rates alone say 1.3


def test_published_fp16_runs_keep_their_rate() -> None:
    assert layer_s("1xV100", "fp16") < layer_s("1xV100", "float32") / 2


def test_operands_and_scores_weigh_by_their_precision() -> None:
    [island] = read_cluster("1xA100").islands
    rates = {p: device_rates(island.device, p, PLAIT_PROFILE) for p in ("bf16", "tf32", "float32")}
    thin = {p: float(product_s(rate, 16, 8192, 8192, flops=1e15)) for p, rate in rates.items()}
    assert thin["tf32"] == thin["float32"] == pytest.approx(2 * thin["bf16"])


def test_a_plan_that_is_read_multiplies_as_it_was_written(tmp_path: Path) -> None:
    plan, path = planned_on(tmp_path, "8xA100", "train.precision=float32"), tmp_path / "plan.json"
    write_plan(plan, path)
    assert read_plan(path).arithmetic.matmul_precision == "tf32"


def test_a_rank_multiplies_as_the_plan_says_whatever_came_before() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        select_matmul_precision("tf32")
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        select_matmul_precision("float32")
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.slow
@pytest.mark.parametrize("override", ["0", "1"])
def test_the_plan_s_choice_wins_over_a_container_s(override: str) -> None:
    """NVIDIA's containers switch TF32 on by a variable that torch reads when it is loaded."""
    script = """
import torch
from plait.trainer.worker import select_matmul_precision
for precision in ("float32", "tf32", "float32"):
    select_matmul_precision(precision)
    # What each product on a GPU asks; an error where torch's two switches disagree.
    print(precision, torch._C._get_cublas_allow_tf32(), torch.backends.cuda.matmul.fp32_precision)
"""
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": override}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["float32 False ieee", "tf32 True tf32", "float32 False ieee"]
