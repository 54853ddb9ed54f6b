"""A mixture of experts as a user would run it: kill -9 and go on, under other layouts, too; sample; what is refused."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from plait.checkpoint.store import verify_checkpoint
from plait.checkpoint.transfer import read_tensor
from tests.end_to_end.command import RECIPE, STEPS, Place, ended, kill_group, wait_while_running
from tests.end_to_end.conftest import RunWarm

MIXTURE = RECIPE.replace("vocabulary = 300", "vocabulary = 300\nexperts = 4\nexpert_balance_rate = 0.01")
FIXED = ("optimizer.schedule=constant", "optimizer.warmup_steps=2", "optimizer.lr=0.01")
BIAS = "model/layers.1.feedforward.router.balance"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("mixture"), MIXTURE)


def bias_at(path: Path) -> torch.Tensor:
    return read_tensor(path, verify_checkpoint(path), BIAS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [(), ("layout.replicate=1", "layout.shard=2", "layout.expert=2")], ids=["copied", "sharded and split"]
)
def test_kill_9_and_go_on_bit_for_bit_with_the_biases(mixed: Place, layout: tuple[str, ...]) -> None:
    whole, killed = f"whole-{len(layout)}", f"killed-{len(layout)}"
    run = mixed.train(whole, *layout, "--no-check")
    assert run.code == 0 and not run.err, run
    process = mixed.start_training(killed, *layout, "--no-check")
    wait_while_running(lambda: bool(mixed.checkpoints(killed)), process)
    kill_group(process, signal.SIGKILL)
    assert ended(process).code == -signal.SIGKILL
    run = mixed.train(killed, *layout, "--no-check")
    assert run.code == 0 and "resume   from step-" in run.out
    assert mixed.numbers(killed) == mixed.numbers(whole) and mixed.manifest(killed) == mixed.manifest(whole)
    path = mixed.path(whole) / "checkpoints" / f"step-{STEPS}"
    assert 0 < bias_at(path).abs().max() <= STEPS * 0.01 + 1e-6
    loads = [line["expert_load_max"] for line in mixed.lines(whole) if "loss" in line]
    assert len(loads) == STEPS and all(1 <= load <= 2 for load in loads)


@pytest.mark.slow
def test_a_run_goes_on_under_other_layouts_with_the_same_biases(mixed: Place, run_warm: RunWarm) -> None:
    name = "handed-on"
    layouts = (
        ("layout.replicate=2", "layout.expert=2"),
        ("layout.replicate=1", "layout.tensor=2"),
        ("layout.replicate=1",),
    )
    for part, layout in enumerate(layouts, start=1):
        run = mixed.train(name, *layout, f"train.budget={20 * part} steps", "--no-check", *FIXED)
        assert run.code == 0 and not run.err, run
    whole = mixed.train("alone", "layout.replicate=1", "--no-check", *FIXED)
    assert whole.code == 0
    one, other = (mixed.lines(run)[-2]["loss"] for run in (name, "alone"))
    assert one == pytest.approx(other, rel=0.02)
    sampled = run_warm(mixed, "sample", name, "--tokens", "5", "--temperature", "0")
    assert sampled.code == 0 and not sampled.err
    refused = run_warm(mixed, "export", name, "--to", "out")
    assert refused.code == 2 and "router sigmoid, balance bias" in refused.sentence()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (
            ("layout.replicate=3", "layout.expert=3"),
            "layout.expert = 3 does not divide 4 experts; choose one of 1, 2, 4",
        ),
        (("layout.shard=3", "layout.replicate=2", "layout.expert=2"), "unlike numbers of the same experts"),
        (("layout.expert=4",), "layout.expert = 4 does not divide the 2 workers of layout.replicate"),
        (("model.experts_per_token=5",), "experts_per_token = 5 is more than the 4 experts"),
        (("model.expert_groups=3",), "does not divide 4 experts"),
        (("model.expert_capacity=0",), "expert_capacity"),
        (("model.experts=auto",), "expert_balance_rate is of a mixture of experts"),
    ],
)
def test_wrong_experts_are_refused_in_one_sentence(
    mixed: Place, run_warm: RunWarm, overrides: tuple[str, ...], part: str
) -> None:
    refused = run_warm(mixed, "train", "tiny.toml", "run.name=wrong", *overrides)
    assert refused.code == 2 and part in refused.sentence()
