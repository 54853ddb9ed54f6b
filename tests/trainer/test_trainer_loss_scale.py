"""float16: torch's GradScaler on one process, the same decisions on every layout, and no bit of a gradient lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from plait.checkpoint.store import verify_checkpoint
from plait.checkpoint.transfer import read_tensor
from plait.parallel.communicator import ONE_PROCESS
from plait.report.metrics import StepReport
from plait.trainer.assemble import Assembly, assemble
from plait.trainer.divergence import DivergenceWatch, NumberGuard, NumberWatch
from plait.trainer.loss_scale import GROWS_AFTER, DeviceLossScale
from plait.trainer.optimizer.optim import learning_rate
from tests.matrix import few_fast
from tests.trainer.rank_entries import float16_steps
from tests.trainer.tiny import make_tiny

TOO_LARGE, STEPS = 2.0**21, 24
"""A first scale by which gradients overflow, and enough steps for several halvings and updates after them."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "copies": {"layout": {"replicate": 2}, "shares": [5, 2]},
    "shard optimizer": {"layout": {"shard": 2, "shard_what": "optimizer"}},
    "shard parameters": {"layout": {"shard": 2, "shard_what": "parameters"}},
    "tensor": {"layout": {"tensor": 2}},
    "context": {"layout": {"context": 2}},
    "pipeline": {"layout": {"pipeline": 2, "stage_layers": [1, 1], "schedule": "1f1b"}},
    "zero-bubble": {"layout": {"pipeline": 2, "stage_layers": [1, 1], "schedule": "zero-bubble"}},
    "recompute": {"layout": {"replicate": 2, "recompute": "full"}},
}

FEW = ["copies", "zero-bubble"]


def test_the_rule_is_grad_scaler_s() -> None:
    ours, torchs = DeviceLossScale(1, torch.device("cpu")), torch.amp.GradScaler("cpu")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    bad_steps, skipped = {0, 1, 5, 6, GROWS_AFTER + 100, 2 * GROWS_AFTER + 101}, 0
    for step in range(3 * GROWS_AFTER + 200):
        used = torchs.get_scale()
        torchs.scale(weight.sum())
        weight.grad = torch.full((1,), float("inf") if step in bad_steps else 0.0)
        torchs.step(optimizer)
        torchs.update()
        skipped += step in bad_steps
        of_step = ours.judge(weight.grad.double().norm())
        assert of_step.tolist() == [used, skipped], step
    assert ours.state[0] == torchs.get_scale() == 2.0**13


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float16")
    make_tiny(folder, "train.batch_tokens=64", precision="fp16", documents="join")
    return folder


def alone(folder: Path, *overrides: str, **planned: Any) -> Assembly:
    config, plan = make_tiny(folder, *overrides, precision="fp16", documents="join", **planned)
    return assemble(config, plan, sums=ONE_PROCESS, stages=())


@pytest.mark.parametrize("kind", few_fast(["adamw", "sgd"], "adamw"))
def test_one_process_decides_and_learns_as_with_grad_scaler(tmp_path: Path, kind: str) -> None:
    """The loop of torch's documentation over plait's model and batches: 64 tokens a step, a power of two, so that both
    scales are one number."""
    chosen = ["train.batch_tokens=64", f"optimizer.kind={kind}", "optimizer.lr=0.01"]
    ours = float16_steps(alone(tmp_path, *chosen, micro_sequences=8), TOO_LARGE, STEPS)
    other = alone(tmp_path, *chosen, micro_sequences=8)
    (model,), plan = other.model.chunks, other.plan.job.optimizer
    optimizer: torch.optim.Optimizer
    groups = [
        {"params": [unit.parameter for unit in other.model.units if unit.decays is decays], "weight_decay": decay}
        for decays, decay in ((True, plan.weight_decay), (False, 0.0))
    ]
    if kind == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=plan.lr, betas=plan.betas)
    else:
        optimizer = torch.optim.SGD(groups, lr=plan.lr, momentum=plan.momentum)
    scaler, position, skipped = torch.amp.GradScaler("cpu", init_scale=TOO_LARGE), 0, 0
    for step in range(STEPS):
        (micro,) = other.loader.micros(position)
        position += 8
        assert int(micro.counted) == 64
        with torch.autocast("cpu", dtype=torch.float16):
            hidden_nd = model(micro.inputs, micro.positions, None)
            logits = F.linear(hidden_nd, model.head_weight())
        loss = F.cross_entropy(logits.float(), micro.targets.flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert plan.clip is not None
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan, step, 20)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        assert (ours["scales"][step], ours["skipped"][step]) == (scale, skipped), step
        assert ours["losses"][step] == pytest.approx(loss.item(), rel=2e-3), step
    assert 3 < skipped < STEPS - 8 and ours["losses"][-1] < 0.9 * ours["losses"][0]


@pytest.mark.parametrize("several", few_fast([[*LAYOUTS], FEW], FEW))
def test_every_layout_decides_as_one_process_does(run_ranks, folder: Path, several: list[str]) -> None:
    """The skipped steps are the same ones on each rank, and the losses those of one process but for float16's
    rounding."""
    asked = {"folder": str(folder), "first": TOO_LARGE, "steps": 14, "cases": [LAYOUTS[name] for name in several]}
    config, plan = make_tiny(folder, precision="fp16", documents="join")
    wanted = float16_steps(assemble(config, plan, sums=ONE_PROCESS, stages=()), TOO_LARGE, 14)
    assert wanted["skipped"][-1] > 3
    told = run_ranks("take_float16_steps", json.dumps(asked), 2)
    for number, name in enumerate(several):
        ours, others = (told[rank]["cases"][number] for rank in (0, 1))
        assert ours["scales"] == others["scales"] and ours["skipped"] == others["skipped"], name
        assert ours["losses"] == others["losses"], name
        if name == "context":  # its products add up half as many tokens in float16, and overflow later
            assert wanted["scales"][-1] <= ours["scales"][-1] <= 2 * wanted["scales"][-1]
            continue
        assert ours["scales"] == wanted["scales"] and ours["skipped"] == wanted["skipped"], name
        assert ours["losses"] == pytest.approx(wanted["losses"], rel=3e-3), name


MIXTURE = (
    "model.experts=4", "model.experts_per_token=2", 'model.expert_balance=["sequence", "global"]',
    "model.router_z_weight=0.01",
)  # fmt: skip
SCALED = {
    "dense": ((), list(LAYOUTS.values())),
    "experts": (MIXTURE, [{"layout": {"shard": 2, "expert": 2}}, {"layout": {"replicate": 2, "expert": 2}}]),
    "further objectives": (("model.predict_ahead=1",), [{"layout": {"replicate": 2}}, LAYOUTS["pipeline"]]),
    "Muon": (("optimizer.kind=muon",), [{"layout": {"replicate": 2}}, {"layout": {"tensor": 2}}]),
}


@pytest.mark.parametrize("what", few_fast(SCALED, "dense"))
def test_a_scale_changes_no_bit_on_any_layout(run_ranks, tmp_path: Path, what: str) -> None:
    """In float64, whose range no scale exceeds: weights, moments and norms are those without a scale, bit for bit."""
    overrides, cases = SCALED[what]
    make_tiny(tmp_path, *overrides, precision="float64")
    told = run_ranks("take_scaled_steps", json.dumps({"folder": str(tmp_path), "cases": cases, "steps": 2}), 2)
    for rank in (0, 1):
        assert told[rank]["differ"] == [[] for _ in cases] and told[rank]["tensors"] > 10


@pytest.mark.parametrize("to", few_fast([1, 3], 3))
def test_scale_and_counters_are_resumed_on_another_number_of_ranks(
    run_ranks, folder: Path, tmp_path: Path, to: int
) -> None:
    asked = {"folder": str(folder), "old": None, "new": str(tmp_path / "half"), "steps": 3}
    run_ranks("restore_and_save", json.dumps(asked), 2)
    (half,) = (tmp_path / "half").iterdir()
    state = read_tensor(half, verify_checkpoint(half), "loss_scale")
    scale, finite_steps, skipped = state.tolist()
    assert finite_steps + skipped == 3 and scale == 2.0 ** (16 - skipped)
    asked |= {"old": str(half), "new": str(tmp_path / "rest"), "steps": 2}
    run_ranks("restore_and_save", json.dumps(asked), to)
    (rest,) = (tmp_path / "rest").iterdir()
    assert sum(read_tensor(rest, verify_checkpoint(rest), "loss_scale").tolist()[1:]) == 5


def report(step: int, **values: Any) -> StepReport:
    usual: dict[str, Any] = {"loss": 3.0, "grad_norm": 1.0, "loss_scale": 2.0**16, "updates_skipped": 0}
    return StepReport(
        step=step, tokens=step, lr=0.1, step_s=1.0, tokens_per_s=1.0, mfu=None, data_wait_s=0.0, **{**usual, **values}
    )


def test_an_update_that_float16_skips_is_no_bad_step_unless_its_scale_is_used_up() -> None:
    numbers, divergence = NumberWatch(NumberGuard(judged_after=0)), DivergenceWatch(0)
    for step in range(1, 16):
        skipped = report(step, grad_norm=float("inf"), loss_scale=2.0 ** (17 - step))
        assert skipped.is_skipped and not skipped.is_finite
        numbers.add(skipped)
        divergence.add(skipped)
        divergence.end_if_diverged(run_ends=True)
    assert numbers.first_bad is None
    for hopeless in (
        report(16, grad_norm=float("nan"), loss_scale=1.0),
        report(16, loss=float("nan"), grad_norm=float("nan")),
        replace(report(16, grad_norm=float("nan")), loss_scale=None),
    ):
        assert not hopeless.is_skipped and NumberWatch(NumberGuard(judged_after=0)).judge(hopeless)
