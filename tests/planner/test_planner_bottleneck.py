"""What limits a run: each cause is found in a run whose times are the cost model's own with that cause in it, and each
remedy gains what the cost model says when it prices the changed plan from the beginning."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.machines.cluster import Cluster, read_cluster
from plait.planner.bottleneck.find import MeasuredRun, find_bottleneck
from plait.planner.bottleneck.fitted_model import PlanPrice, fitted_model, priced_plan
from plait.planner.derive.resources import Resources, on_paper
from plait.planner.explain.changes import with_faster_links, with_memory
from plait.planner.plan import HostShare, Plan
from plait.planner.plan_file import plan_text, read_plan
from plait.planner.resolve.resolve import draft, settle
from plait.report.bottleneck import LEAST_REMEDY_GAIN, RunBottleneck, bottleneck_lines
from tests.planner.hosts import probed
from tests.planner.machines import LAPTOP, PEAK_FLOPS, PLAYS, recipe, without_reasons
from tests.plans import changed

USUAL = ("model.size=1M", "train.budget=1000 steps", "train.sequence=256", "train.batch_tokens=4096")
TWO_HOSTS = (HostShare(name="a", workers=1, threads=1), HostShare(name="b", workers=1, threads=1))


def plan_on(resources: Resources, tmp_path: Path, *overrides: str) -> Plan:
    outline = draft(recipe(tmp_path, *USUAL, *overrides), PLAYS, resources, recipe_hash="cafe")
    return settle(recipe(tmp_path, *USUAL, *overrides), outline, without_reasons(outline.layouts)[:1])


@pytest.fixture
def alone(tmp_path: Path) -> Plan:
    return plan_on(Resources(machine=LAPTOP, peak_flops=PEAK_FLOPS[LAPTOP]), tmp_path, "layout.replicate=1")


def two_hosts(tmp_path: Path, *overrides: str, rate: float = 1e9, layout: str = "layout.replicate=2") -> Plan:
    return changed(plan_on(on_paper(probed(1.0, 1.0, rate=rate)), tmp_path, layout, *overrides), hosts=TWO_HOSTS)


def priced(plan: Plan) -> PlanPrice:
    price = priced_plan(plan)
    assert price is not None
    return price


def on_cluster(plan: Plan, cluster: Cluster) -> Plan:
    """The plan as if it had been made for other machines."""
    assert plan.forecast is not None
    return replace(plan, forecast=replace(plan.forecast, cluster=cluster))


def cluster_of(plan: Plan) -> Cluster:
    assert plan.forecast is not None and plan.forecast.cluster is not None
    return plan.forecast.cluster


def step_s(price: PlanPrice) -> float:
    return sum(price.groups().values())


def run_like(price: PlanPrice, ranks: int, slower: float = 1.0, **more: Any) -> MeasuredRun:
    """A run whose ranks all spend their steps as a price says, on machines that take `slower` times as long."""
    groups = price.groups()
    run = MeasuredRun(
        compute_s=(groups["compute"] * slower,) * ranks,
        wait_s=(groups["messages"] * slower,) * ranks,
        inside_s=(groups["inside"] * slower,) * ranks,
        data_s=(0.0,) * ranks,
        rest_s=(groups["rest"] * slower,) * ranks,
    )
    return replace(run, **more)


def found(plan: Plan, run: MeasuredRun, named: Collection[str] = ()) -> RunBottleneck:
    return find_bottleneck(plan, run, named)


def test_a_price_of_a_plan_is_its_forecast(alone: Plan, tmp_path: Path) -> None:
    gpus = plan_on(on_paper(read_cluster("8xH100")), tmp_path, "layout.replicate=8")
    for plan in (gpus, two_hosts(tmp_path), two_hosts(tmp_path, layout="layout.pipeline=2")):
        assert plan.forecast is not None
        assert step_s(priced(plan)) == pytest.approx(plan.forecast.step_s)
    # On a processor that was not probed starting kernels counts in addition: little with usual micro-batches.
    assert alone.forecast is not None
    assert 1 < step_s(priced(alone)) / alone.forecast.step_s < 1.1


def test_the_machines_of_a_plan_are_in_its_file(tmp_path: Path) -> None:
    plan = two_hosts(tmp_path, rate=3e7)
    (tmp_path / "plan.json").write_text(plan_text(plan))
    back = read_plan(tmp_path / "plan.json")
    assert cluster_of(back) == cluster_of(plan)
    assert step_s(priced(back)) == step_s(priced(plan))


def test_a_healthy_run_has_no_remedy(alone: Plan) -> None:
    """A thousand steps as planned, also on a machine of another speed."""
    for slower in (0.5, 1.0, 3.0):
        one = found(alone, run_like(priced(alone), 1, slower, start_s=5.0))
        assert one.cause in ("products", "head", "memory rate") and one.remedies == ()
        assert one.share > 0.2 and "no known change" in one.sentence


def test_a_slow_cable_is_found_and_a_faster_one_priced(tmp_path: Path) -> None:
    plan = two_hosts(tmp_path, rate=1e9)
    slow = with_faster_links(cluster_of(plan), "between", 1 / 200)
    run = run_like(priced(on_cluster(plan, slow)), 2, slower=1.0)
    one = found(plan, run)
    assert one.cause == "network" and one.sentence.startswith("The cable to host b takes")
    assert one.share == pytest.approx(run.wait_s[0] / run.step_s)
    cable, bf16 = sorted(one.remedies, key=lambda remedy: remedy.setting)
    faster = on_cluster(plan, with_faster_links(slow, "between", cable.factor))
    assert cable.gain == pytest.approx(run.step_s / step_s(priced(faster)), rel=0.05)
    assert "40 Mbit/s" in cable.change and bf16.setting == "train.gradient_transfer=bf16"
    halved = changed(on_cluster(plan, slow), arithmetic=replace(plan.arithmetic, gradient_transfer="bf16"))
    assert bf16.gain == pytest.approx(run.step_s / step_s(priced(halved)), rel=0.05)


def test_computing_that_is_slower_than_planned_is_no_slow_cable(tmp_path: Path) -> None:
    plan = two_hosts(tmp_path)
    groups = priced(plan).groups()
    run = run_like(priced(plan), 2)
    slower = replace(run, compute_s=(5 * groups["compute"],) * 2)
    assert found(plan, slower).remedies == ()


def test_stages_of_a_pipeline_may_send_less(tmp_path: Path) -> None:
    plan = two_hosts(tmp_path, layout="layout.pipeline=2")
    slow = with_faster_links(cluster_of(plan), "between", 1 / 100)
    one = found(plan, run_like(priced(on_cluster(plan, slow)), 2))
    assert one.cause == "network"
    assert "train.stage_transfer=bf16" in [remedy.setting for remedy in one.remedies]


def test_a_slow_host_is_found_by_its_name(tmp_path: Path) -> None:
    plan = changed(two_hosts(tmp_path), balance_every_steps=0)
    run = run_like(priced(plan), 2)
    wait = run.wait_s[0]
    computed = run.compute_s[0]
    update = run.rest_s[0]
    slow = replace(
        run,
        compute_s=(computed, 4 * computed),
        wait_s=(wait + 3 * computed, wait),
        rest_s=(4 * update, 4 * update),  # the others wait for its update before their next step
    )
    one = found(plan, slow)
    assert one.cause == "slow host" and "Host b takes 4 times as long" in one.sentence
    assert one.share == pytest.approx(3 * (computed + update) / slow.step_s)
    even, *others = one.remedies
    assert even.gain == pytest.approx(slow.step_s / run.step_s) and even.setting == ""
    [balanced] = [remedy for remedy in others if remedy.setting == "balance.every=10 steps"]
    # 16 sequences: 13 for the fast host, 3 for the slow one, which takes 3 / 8 of 4 times as long.
    beside = slow.step_s - 4 * computed
    assert balanced.gain == pytest.approx(slow.step_s / (beside + 13 / 8 * computed))
    [left_out] = [remedy for remedy in others if "leaving host b out" in remedy.change]
    assert left_out.gain == pytest.approx(slow.step_s / (beside - wait - 3 * update + 2 * computed))


def test_a_stage_with_more_layers_is_no_slow_host(tmp_path: Path) -> None:
    plan = two_hosts(tmp_path, "layout.stage_layers=[3, 1]", layout="layout.pipeline=2")
    run = run_like(priced(plan), 2)
    computed = run.compute_s[0]
    assert plan.forecast is not None and plan.forecast.head_cost_in_layers is not None
    last = (1 + plan.forecast.head_cost_in_layers) / (3 + plan.forecast.embedding_cost_in_layers)
    assert last < 0.8
    uneven = replace(run, compute_s=(computed, last * computed))
    assert found(plan, uneven).cause != "slow host"
    slowed = replace(run, compute_s=(3 * computed, last * computed))
    assert found(plan, slowed).cause == "slow host"


def test_a_slower_machine_with_a_smaller_share_is_no_slow_host(tmp_path: Path) -> None:
    plan = changed(two_hosts(tmp_path), shares=(12, 4))
    assert found(plan, run_like(priced(plan), 2)).cause != "slow host"


def test_waiting_for_data_is_found(alone: Plan) -> None:
    run = run_like(priced(alone), 1)
    starved = replace(run, data_s=(run.step_s,))
    one = found(alone, starved)
    assert (one.cause, one.share) == ("data", pytest.approx(0.5))
    [remedy] = one.remedies
    assert remedy.gain == remedy.factor == pytest.approx(2.0) and ".plait/data" in remedy.change


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_that_was_asked_for_is_found(alone: Plan, mode: Any) -> None:
    plan = changed(alone, layout=replace(alone.placement.layout, recompute=mode))
    run = run_like(priced(plan), 1, slower=2.0)
    one = found(plan, run, ["layout.recompute"])
    gain = step_s(priced(plan)) / step_s(priced(alone))
    if gain < LEAST_REMEDY_GAIN:
        assert one.remedies == ()
        return
    assert one.cause == "recomputation" and f'layout.recompute = "{mode}"' in one.sentence
    [remedy] = one.remedies
    assert remedy.setting == "layout.recompute=none" and remedy.gain == pytest.approx(gain, rel=0.02)


def test_recomputation_for_want_of_memory_asks_for_memory(alone: Plan) -> None:
    full = changed(alone, layout=replace(alone.placement.layout, recompute="full"))
    price = priced(alone)
    needed = price.found.bytes_per_device(price.found.chosen)
    have = min(island.device.memory_bytes for island in cluster_of(full).islands)
    small = on_cluster(full, with_memory(cluster_of(full), 0.9 * needed / have))
    one = found(small, run_like(priced(full), 1))
    assert one.cause == "memory" and "full recomputation" in one.sentence
    [remedy] = one.remedies
    assert remedy.gain == pytest.approx(step_s(priced(full)) / step_s(price), rel=0.02)


def test_micro_batches_that_are_too_small_are_found(tmp_path: Path) -> None:
    short = ("train.sequence=16", "train.batch_tokens=1024", "layout.replicate=1", "layout.micro_sequences=1")
    plan = plan_on(Resources(machine=LAPTOP, peak_flops=PEAK_FLOPS[LAPTOP]), tmp_path, *short)
    assert plan.placement.micro_sequences == 1
    one = found(plan, run_like(priced(plan), 1, slower=1.5), ["layout.micro_sequences"])
    assert one.cause == "micro-batch"
    [remedy] = one.remedies
    size = int(remedy.setting.removeprefix("layout.micro_sequences="))
    larger = changed(plan, micro_sequences=size)
    assert size > 1 and remedy.gain == pytest.approx(step_s(priced(plan)) / step_s(priced(larger)), rel=0.02)
    by_itself = found(plan, run_like(priced(plan), 1))
    assert by_itself.cause != "micro-batch", "what plait chose is not advised against"


@pytest.mark.parametrize(("width", "before_s", "after_s"), [(128, 0.0959, 0.0229), (192, 0.1208, 0.0373)])
def test_gains_of_larger_micro_batches_are_those_of_a_real_run(
    tmp_path: Path, width: int, before_s: float, after_s: float
) -> None:
    """Steps of 32 micro-batches of 8 tokens, and of one of 256, on one quiet core at 105 GFLOP/s."""
    model = {"layers": 4, "width": width, "heads": width // 32, "vocabulary": 512}
    train = {"sequence": 8, "batch_tokens": 256, "precision": "float32", "matmul_backend": "default"}
    run = {"workers": 1, "threads": 1}
    sections = {"model": model, "train": train, "run": run, "layout": {"micro_sequences": 1}}
    keys = [f"{section}.{key}={value}" for section, values in sections.items() for key, value in values.items()]
    config = recipe(tmp_path, "train.budget=30 steps", *keys)
    facts = replace(PLAYS, vocabulary=512)
    outline = draft(config, facts, Resources(machine=LAPTOP, peak_flops=8 * 105e9), recipe_hash="cafe")
    plan = settle(config, outline, without_reasons(outline.layouts)[:1])
    as_measured = run_like(priced(plan), 1, rest_s=(0.002,), compute_s=(before_s - 0.002,))
    one = found(plan, as_measured, ["layout.micro_sequences"])
    [remedy] = one.remedies
    assert remedy.setting == "layout.micro_sequences=32"
    assert remedy.gain - 1 == pytest.approx(before_s / after_s - 1, rel=0.15)


def test_a_short_run_spends_its_time_starting(alone: Plan) -> None:
    steps = round(5 / step_s(priced(alone)))
    few, seconds = changed(alone, steps=steps), steps * step_s(priced(alone))
    one = found(few, run_like(priced(few), 1, start_s=20.0))
    assert (one.cause, one.share) == ("start-up", pytest.approx(20 / (20 + seconds), rel=0.01))
    [remedy] = one.remedies
    assert remedy.setting == f"train.budget={50 * steps} steps"
    assert remedy.gain == pytest.approx((20 / seconds + 1) / (20 / (50 * seconds) + 1), rel=0.01)
    assert found(few, run_like(priced(few), 1, start_s=9.0)).cause != "start-up"


def test_what_gains_most_of_the_whole_run_is_named(alone: Plan) -> None:
    """Data that take half of each step matter less than a start that takes nearly all of the run."""
    few = changed(alone, steps=10)
    run = run_like(priced(few), 1)
    starved = replace(run, data_s=(run.step_s,))
    assert found(few, replace(starved, start_s=100 * run.step_s)).cause == "start-up"
    assert found(few, replace(starved, start_s=2 * run.step_s)).cause == "data"


def test_a_plan_of_an_earlier_version_still_tells_what_was_measured(alone: Plan) -> None:
    assert alone.forecast is not None
    old = replace(alone, forecast=replace(alone.forecast, cluster=None))
    run = run_like(priced(alone), 1)
    assert fitted_model(old, run.of_critical_rank) is None
    assert found(old, run).cause == "products" and found(old, run).remedies == ()
    assert found(old, replace(run, data_s=(run.step_s,))).cause == "data"


def test_float32_layers_that_are_not_compiled_are_named_on_a_gpu(tmp_path: Path) -> None:
    resources = on_paper(read_cluster("8xH100"))
    plan = plan_on(resources, tmp_path, "layout.replicate=8", "train.compile=off", "train.batch_tokens=65536")
    one = found(plan, run_like(priced(plan), 8), ["train.compile"])
    assert one.cause in ("kernel launches", "network") and one.remedies


def test_the_lines_are_a_sentence_and_the_remedies_with_their_gains(alone: Plan) -> None:
    run = run_like(priced(alone), 1)
    one = found(alone, replace(run, data_s=(2 * run.step_s,)))
    assert bottleneck_lines(one) == [
        "Waiting for training data takes 67% of each step.",
        "the prepared text (.plait/data) on a disk that is 3 times as fast: 3 times as fast",
    ]
    assert bottleneck_lines(None) == []
