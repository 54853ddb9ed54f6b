"""Shares that changed during a run: killed just before and just after a change, it ends as if it was left alone."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest

from plait.checkpoint.store import verify_checkpoint
from tests.end_to_end.command import Place, ended, kill_group, wait_while_running
from tests.end_to_end.conftest import RunWarm

LINES = [
    {"step": 15, "shares": [5, 2], "reason": "rank 1 is 2.5 times slower than rank 0", "speeds": [5.0, 2.0]},
    {"step": 33, "shares": [1, 6], "reason": "rank 0 is 6.0 times slower than rank 1", "speeds": [1.0, 6.0]},
]


def record(place: Place, name: str, more: str = "") -> None:
    place.path(name).parent.mkdir(mode=0o700, exist_ok=True)  # as a run would have made it, which other tests look at
    place.path(name).mkdir()
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    (place.path(name) / "shares.jsonl").write_text(text + more)


@pytest.mark.slow
def test_kill_9_just_before_and_just_after_a_change_of_shares(place: Place, reference: Callable[[int], str]) -> None:
    whole, name = "shared", "shared-killed"
    record(place, whole)
    record(place, name, more='{"step": 40, "shares": [3, ')
    assert place.train(whole).code == 0
    metrics = place.path(name) / "metrics.jsonl"
    for step in (14, 33):  # the last step before a change, the first one after the next
        process = place.start_training(name)
        wait_while_running(lambda step=step: metrics.exists() and f'"step": {step},' in metrics.read_text(), process)
        kill_group(process, signal.SIGKILL)
        assert ended(process).code == -signal.SIGKILL
        place.assert_nobody_left()
    assert place.checkpoints(name)[-1] < 60
    last = place.train(name)
    assert last.code == 0 and not last.err and "resume   from step-" in last.out
    assert place.numbers(name) == place.numbers(whole)
    assert place.manifest(name) == place.manifest(whole)
    # The sums of gradients are added in another order than with equal shares: so the lines were obeyed.
    assert place.manifest(whole) != place.manifest(reference(2))


@pytest.mark.slow
def test_kill_9_just_before_and_just_after_stages_are_cut_anew(place: Place) -> None:
    piped = ("layout.replicate=1", "layout.pipeline=2", "layout.stage_layers=[2,2]", "model.layers=4", "--no-check")
    lines = [
        {"step": step, "shares": [7], "reason": "as a test wrote", "speeds": [1.0, 2.0], "stage_layers": layers}
        for step, layers in ((15, [3, 1]), (33, [1, 3]))
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for name in ("cut", "cut-killed"):
        place.path(name).mkdir(parents=True)
        (place.path(name) / "shares.jsonl").write_text(text)
    assert place.train("cut", *piped).code == 0
    metrics = place.path("cut-killed") / "metrics.jsonl"
    for step in (14, 33):
        process = place.start_training("cut-killed", *piped)
        wait_while_running(lambda step=step: metrics.exists() and f'"step": {step},' in metrics.read_text(), process)
        kill_group(process, signal.SIGKILL)
        assert ended(process).code == -signal.SIGKILL
        place.assert_nobody_left()
    last = place.train("cut-killed", *piped)
    assert last.code == 0 and not last.err and "resume   from step-" in last.out
    assert place.numbers("cut-killed") == place.numbers("cut")
    assert place.manifest("cut-killed") == place.manifest("cut")
    path = place.path("cut") / "checkpoints" / "step-60"
    second = [part.file for part in verify_checkpoint(path).parts if part.tensor.startswith("model/layers.1.")]
    assert set(second) == {"rank-00001.safetensors"}  # which the plan gives to rank 0: so the lines were obeyed


def test_a_line_that_cannot_be_obeyed_stops_the_run_before_it_begins(place: Place, run_warm: RunWarm) -> None:
    record(place, "shared-wrong", more='{"step": 40, "shares": [3, 3], "reason": "", "speeds": []}\n')
    refused = run_warm(place, "train", "tiny.toml", "run.name=shared-wrong")
    assert refused.code == 2
    assert refused.sentence() == (
        "runs/shared-wrong/shares.jsonl shares 6 sequences among 2 from step 40 on, and the plan 7 among 2; "
        "take the file away to go on with the plan's shares"
    )
