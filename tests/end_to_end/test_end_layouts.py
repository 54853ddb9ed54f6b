"""Every strand as a user would run it: kill -9 and go on bit for bit, go on under another layout, sample, evaluate."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from plait.checkpoint.manifest import tensor_names
from plait.checkpoint.store import verify_checkpoint
from plait.checkpoint.transfer import read_tensor
from tests.end_to_end.command import STEPS, Place, ended, kill_group, wait_while_running
from tests.end_to_end.conftest import LeftAlone, RunWarm

MIXED = {
    "pipeline 2 × tensor 2": ("pipeline=2", "tensor=2"),
    "shard 2 × context 2": ("shard=2", "context=2"),
    "shard 2, parameters": ("shard=2", 'shard_what="parameters"'),
}
GOES_ON = {
    "pipeline 2 × tensor 2": ("pipeline=2", "tensor=2"),
    "shard 2 × context 2": ("shard=2", "context=2"),
    "shard 3, optimizer": ("shard=3",),
    "shard 2 × replicate 2, parameters": ("shard=2", "replicate=2", 'shard_what="parameters"'),
}
"""Each axis once; its other settings (schedules, recomputing) change no checkpoint, and parity has them."""
WRONG = (
    (("tensor=3",), "layout.tensor = 3 does not divide 2 heads; choose one of 1, 2"),
    (("shard=8",), "8 workers cannot share 7 sequences a step"),
)
WRONG_TOO = (
    (("context=3",), "choose a multiple of 6"),
    (("pipeline=3",), "a pipeline of 3 stages needs as many layers, and the model has 2"),
    (("pipeline=2", "stage_layers=[2, 1]"), "add up to the model's 2 layers"),
    (("pipeline=2", "schedule=interleaved"), "layout.virtual_stages = 2"),
)


def asked(overrides: tuple[str, ...]) -> list[str]:
    """The overrides of a layout; the recipe of these tests names two copies."""
    named = [f"layout.{text}" for text in overrides]
    return named if any("replicate" in text for text in overrides) else ["layout.replicate=1", *named]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pipeline 2 × tensor 2", "shard 2 × context 2"])
def test_a_diverged_run_ends_with_a_sentence_on_every_rank(place: Place, run_warm: RunWarm, layout: str) -> None:
    name = f"diverged-{slug(layout)}"
    run = place.train(name, "optimizer.lr=1e10", "--no-check", *asked(MIXED[layout]))
    assert run.code == 1 and "warning: optimizer.lr = 1e+10 is " in run.out
    assert "no finite loss and gradient since step 2 (loss nan), so it was ended after step 11" in run.sentence()
    assert place.checkpoints(name) == [] and place.lines(name)[-1]["step"] == 11
    place.assert_nobody_left()
    for command in ("eval", "sample"):
        refused = run_warm(place, command, name)
        assert refused.code == 2 and "diverged before its first checkpoint; train again with" in refused.sentence()


def slug(layout: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in layout.replace("×", "x"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", GOES_ON)
def test_kill_9_and_go_on_bit_for_bit(place: Place, left_alone: LeftAlone, layout: str) -> None:
    overrides = asked(GOES_ON[layout])
    whole, killed = left_alone(*overrides), f"killed-{slug(layout)}"
    process = place.start_training(killed, *overrides)
    wait_while_running(lambda: max(place.checkpoints(killed), default=0) >= 20, process)
    kill_group(process, signal.SIGKILL)
    assert ended(process).code == -signal.SIGKILL
    place.assert_nobody_left()
    assert place.checkpoints(killed)[-1] < STEPS
    last = place.train(killed, *overrides)
    assert last.code == 0 and not last.err and "resume   from step-" in last.out
    assert place.numbers(killed) == place.numbers(whole)
    assert place.manifest(killed) == place.manifest(whole)


@pytest.mark.slow
def test_any_layout_goes_on_with_any_other_s_run(place: Place) -> None:
    """One after the other takes a run further, and the losses stay those of one process."""
    fixed = ("optimizer.schedule=constant", "optimizer.warmup_steps=2", "optimizer.lr=0.01")
    for part, overrides in enumerate([*MIXED.values(), ("replicate=2",)], start=1):
        strands = asked(overrides)
        run = place.train("round", f"train.budget={15 * part} steps", "--no-check", *fixed, *strands)
        assert run.code == 0 and not run.err, run
    assert place.checkpoints("round")[-1] == STEPS
    assert place.train("alone", "--no-check", "layout.replicate=1", *fixed).code == 0
    reference = {line["step"]: line["loss"] for line in place.lines("alone") if "loss" in line}
    found = {line["step"]: line["loss"] for line in place.lines("round") if "loss" in line}
    assert found.keys() == reference.keys()
    assert all(abs(found[step] - loss) < 1e-4 for step, loss in reference.items())


@pytest.mark.slow
def test_a_checkpoint_of_any_layout_is_whole_and_speaks(place: Place, left_alone: LeftAlone, run_warm: RunWarm) -> None:
    name = left_alone(*asked(("pipeline=2", "tensor=2")))
    path = place.path(name) / "checkpoints" / f"step-{STEPS}"
    manifest = verify_checkpoint(path)
    weights = [name for name in tensor_names(manifest) if name.startswith("model/")]
    assert all(torch.isfinite(read_tensor(path, manifest, name)).all() for name in weights)
    said = run_warm(place, "sample", name, "--prompt", "Ka", "--tokens", "5")
    assert said.code == 0 and said.out.startswith("Ka") and len(said.out) > 3
    judged = run_warm(place, "eval", name)
    assert judged.code == 0
    told = [line["eval_loss"] for line in place.lines(name) if "eval_loss" in line][-1]
    assert json.loads(judged.out)["eval_loss"] == pytest.approx(told, rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "part"), [*WRONG, *(pytest.param(*one, marks=pytest.mark.slow) for one in WRONG_TOO)]
)
def test_a_wrong_layout_is_refused_in_one_sentence(
    place: Place, run_warm: RunWarm, overrides: tuple[str, ...], part: str
) -> None:
    refused = run_warm(place, "train", "tiny.toml", "run.name=refused", *asked(overrides))
    assert refused.code == 2
    assert part in refused.sentence(), refused.sentence()
    assert not place.path("refused").exists()
