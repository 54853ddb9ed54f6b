"""Heads in the middle and prediction ahead as a user would: kill -9, go on in other layouts, sample, export."""

from __future__ import annotations

import signal

import pytest

from plait.checkpoint.store import verify_checkpoint
from tests.end_to_end.command import RECIPE, STEPS, Place, ended, kill_group, wait_while_running
from tests.end_to_end.conftest import RunWarm

LEARNING = RECIPE.replace(
    "layers = 2", "layers = 3\nauxiliary_heads = [1, 2]\npredict_ahead = 2\nnorm = 'rmsnorm'"
).replace("replicate = 2", "pipeline = 2")


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("objectives"), LEARNING)


@pytest.mark.slow
def test_kill_9_and_go_on_bit_for_bit_and_every_loss_falls(learning: Place) -> None:
    run = learning.train("whole")
    assert run.code == 0 and not run.err, run
    process = learning.start_training("killed")
    wait_while_running(lambda: bool(learning.checkpoints("killed")), process)
    kill_group(process, signal.SIGKILL)
    assert ended(process).code == -signal.SIGKILL
    run = learning.train("killed")
    assert run.code == 0 and "resume   from step-" in run.out
    assert learning.numbers("killed") == learning.numbers("whole")
    assert learning.manifest("killed") == learning.manifest("whole")
    steps = [line for line in learning.lines("whole") if "loss" in line]
    assert list(steps[0]["auxiliary_losses"]) == ["layer_1", "layer_2", "ahead_1", "ahead_2"]
    first, last = (steps[place]["auxiliary_losses"] for place in (0, -1))
    assert len(steps) == STEPS and all(last[name] < first[name] - 0.3 for name in first)


@pytest.mark.slow
def test_a_run_goes_on_under_other_layouts_and_what_uses_it_leaves_them_out(learning: Place, run_warm: RunWarm) -> None:
    fixed = ("optimizer.schedule=constant", "optimizer.warmup_steps=2", "optimizer.lr=0.01")
    layouts = (
        ("layout.pipeline=3", "layout.schedule=zero-bubble"),
        ("layout.pipeline=1", "layout.context=2"),
        ("layout.pipeline=1", "layout.tensor=2"),
    )
    for part, layout in enumerate(layouts, start=1):
        run = learning.train("handed-on", "--no-check", *layout, f"train.budget={20 * part} steps", *fixed)
        assert run.code == 0 and not run.err, run
    assert learning.train("alone", "--no-check", "layout.pipeline=1", *fixed).code == 0
    one, other = (learning.lines(run)[-2] for run in ("handed-on", "alone"))
    assert one["loss"] == pytest.approx(other["loss"], rel=0.02)
    sampled = run_warm(learning, "sample", "handed-on", "--tokens", "5", "--temperature", "0")
    assert sampled.code == 0 and not sampled.err
    measured = run_warm(learning, "eval", "handed-on")
    assert measured.code == 0 and "nats per token" in measured.err, measured
    exported = run_warm(learning, "export", "handed-on", "--to", "out")
    assert exported.code == 0 and "left out, for no family has them" in exported.out, exported
    assert "the norms of the heads after 1 and 2 layers and the 2 modules for prediction ahead" in exported.out
    path = learning.path("handed-on") / "checkpoints" / f"step-{STEPS}"
    kept = {part.tensor for part in verify_checkpoint(path).parts}
    assert {"model/auxiliary.1.norm.weight", "model/ahead.2.projection.weight"} <= kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (("model.auxiliary_heads=[1,7]",), "names 7, and a model of 3 layers has its own head after the last"),
        (("model.predict_ahead=16",), "predict_ahead = 16 looks beyond a sequence of 16 tokens; choose at most 15"),
        (("model.auxiliary_heads=[2,2]",), "names a layer twice"),
        (("model.auxiliary_head_weight=-1",), "auxiliary_head_weight"),
        (("model.predict_ahead_weight=-1",), "predict_ahead_weight"),
        (("model.auxiliary_heads=[]", "model.auxiliary_head_weight=1"), "names none"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    learning: Place, run_warm: RunWarm, overrides: tuple[str, ...], part: str
) -> None:
    refused = run_warm(learning, "train", "tiny.toml", "run.name=wrong", *overrides)
    assert refused.code == 2 and part in refused.sentence()
