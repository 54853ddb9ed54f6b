"""Latent attention as a user would run it: train on two workers, resume, sample, hand on as a DeepSeek-V3, and go on
from that."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from plait.checkpoint.store import verify_checkpoint
from plait.checkpoint.transfer import read_tensor
from plait.commands.models.opened_model import open_model
from plait.working_folder import WorkingFolder
from tests.end_to_end.command import RECIPE, STEPS, Place, ended, kill_group, wait_while_running
from tests.end_to_end.conftest import RunWarm

DEEPSEEK = """vocabulary = 300
key_value_rank = 12
query_rank = 20
experts = 4
expert_groups = 2
expert_groups_chosen = 1
shared_experts = 1
dense_layers = 1
expert_balance_rate = 0.01
router_scale = 2.5"""
GO_ON = """
[model]
from = "out"

[data]
files = "play.txt"

[train]
sequence = 16
batch_tokens = 112
budget = "10 steps"
matmul_backend = "default"

[layout]
replicate = 2

[checkpoint]
every = "5 steps"
"""
BIAS = "layers.1.feedforward.router.balance"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("latent"), RECIPE.replace("vocabulary = 300", DEEPSEEK))


@pytest.mark.slow
def test_it_is_killed_goes_on_and_is_handed_on_as_a_deepseek(place: Place, run_warm: RunWarm) -> None:
    layout = ("layout.replicate=1", "layout.tensor=2", "--no-check")
    whole = place.train("whole", *layout)
    assert whole.code == 0 and not whole.err, whole
    process = place.start_training("killed", *layout)
    wait_while_running(lambda: bool(place.checkpoints("killed")), process)
    kill_group(process, signal.SIGKILL)
    assert ended(process).code == -signal.SIGKILL
    run = place.train("killed", *layout)
    assert run.code == 0 and "resume   from step-" in run.out
    assert place.numbers("killed") == place.numbers("whole") and place.manifest("killed") == place.manifest("whole")
    losses = [line["loss"] for line in place.lines("whole") if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    sampled = run_warm(place, "sample", "whole", "--tokens", "5", "--temperature", "0")
    assert sampled.code == 0 and not sampled.err
    exported = run_warm(place, "export", "whole", "--to", "out")
    assert exported.code == 0 and "deepseek_v3" in exported.out, exported
    assert run_warm(place, "sample", "out", "--tokens", "5", "--temperature", "0").out == sampled.out
    first, again = (run_warm(place, "eval", *names) for names in (("whole",), ("out", "--heldout-of", "whole")))
    one, other = (json.loads(told.out)["nats_per_token"] for told in (first, again))
    assert one == pytest.approx(other, rel=1e-6)
    theirs = AutoModelForCausalLM.from_pretrained(place.folder / "out")
    assert type(theirs).__name__ == "DeepseekV3ForCausalLM"
    (place.folder / "on.toml").write_text(GO_ON)
    on = place.run("train", "on.toml", "run.name=on", "--no-check")
    assert on.code == 0 and not on.err, on
    begun = next(line["loss"] for line in place.lines("on") if "loss" in line)
    assert begun < 0.8 * losses[0]  # the weights are the trained ones
    path = place.path("whole") / "checkpoints" / f"step-{STEPS}"
    kept = read_tensor(path, verify_checkpoint(path), f"model/{BIAS}")
    working = WorkingFolder(place.folder)
    assert kept.abs().max() > 0
    torch.testing.assert_close(open_model("out", working).model.get_buffer(BIAS), kept, rtol=0, atol=0)
    moved = open_model("on", working).model.get_buffer(BIAS) - kept
    assert 0 < moved.abs().max() <= 10 * 0.001 + 1e-6  # it went on from there, by the rate of a model from elsewhere


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model.kv_heads=1", "each head has keys of its own, and kv_heads is 1 of 2"),
        ("model.rope_head_width=3", "model.rope_head_width is 3; choose an even one"),
        ("model.bias=qkv", "latent attention has no biases"),
        ("layout.tensor=4", "layout.tensor = 4 does not divide 2 heads"),
    ],
)
def test_what_does_not_go_with_it_is_one_sentence(place: Place, run_warm: RunWarm, override: str, part: str) -> None:
    refused = run_warm(place, "train", "tiny.toml", "run.name=refused", override)
    assert refused.code == 2 and part in refused.sentence()
    assert not place.path("refused").exists()
