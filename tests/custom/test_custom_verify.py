"""`run.verify` names each planted fault and its layer, and finds nothing in a clean program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from plait.custom.group import alone
from plait.custom.verifying.verify import verify_program
from plait.launch.values.job import Job, Message
from tests.custom.verify_entries import PLANTED, SHARES, planted_program, whole_batch
from tests.shared_ranks import RanksOf

Told = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def server() -> RanksOf:
    return RanksOf("tests.custom.verify_entries")


@pytest.fixture(scope="module")
def verdicts(server: RanksOf) -> Told:
    """Of every planted program, on two workers with unequal shares."""
    return verdicts_of(server, "replicate", list(PLANTED))


def verdicts_of(server: RanksOf, layout: str, programs: list[str], shares: Sequence[int] = SHARES) -> Told:
    told: dict[int, Told] = {}

    def hear(message: Message) -> None:
        told[message.rank] = message.values["verdicts"]

    asked = json.dumps({"layout": layout, "programs": programs, "shares": shares})
    server.run(Job(entry="verify_planted", argument=asked, world_size=2, threads=1), on_message=hear).require_finished()
    assert [one["ok"] for one in told[0].values()] == [one["ok"] for one in told[1].values()]
    return told[0]


@pytest.mark.parametrize("name", ["clean", "own batch norm", "kept output"])
def test_a_clean_program_is_proven_and_nothing_is_named(verdicts: Told, name: str) -> None:
    assert verdicts[name]["ok"] and verdicts[name]["error"] <= 1e-10
    assert verdicts[name]["causes"] == verdicts[name]["remarks"] == []
    assert "proven" in verdicts[name]["text"]


CAUSES = {
    "batch norm": ("between.0: BatchNorm over each worker's local batch", "with it the gradients are equal here"),
    "buffer": ("the buffer between.0.center is changed in the forward pass", "between.0 (Centered)"),
    "norm by a function": ("the first layer whose output differs is between.0 (Standardized)",),
    "noise": ("between.0 draws random numbers", "between.0 (Noisy)"),
    "mean": ("loss_sum returns a mean", "differs by"),
    "16 bits": ("narrow_loss computes in less than float64", "all layers put out the same"),
}


@pytest.mark.parametrize(("name", "sentences"), CAUSES.items())
def test_a_cause_is_named_with_its_layer(verdicts: Told, name: str, sentences: tuple[str, ...]) -> None:
    assert not verdicts[name]["ok"]
    for sentence in sentences:
        assert sentence in " ".join(verdicts[name]["causes"])
    others = [cause for other, (cause, *_) in CAUSES.items() if other != name]
    assert not [cause for cause in others if cause in verdicts[name]["text"]]


REMARKS = {
    "dropout": "dropout was set to 0",
    "unused": "between.0.unused.weight got no gradient",
    "float32 inside": "something computes in less than float64, so gradients were compared to 1e-04",
    "views": "between.0.low and between.0.high are views of the same memory",
    "changed view": "the output of between.1 is a view of another tensor and is changed in place",
}


@pytest.mark.parametrize(("name", "sentence"), REMARKS.items())
def test_what_changes_no_gradient_is_said_beside_the_proof(verdicts: Told, name: str, sentence: str) -> None:
    assert verdicts[name]["ok"], verdicts[name]["text"]
    assert [sentence in remark for remark in verdicts[name]["remarks"]] == [True]


def test_a_mean_is_named_where_each_worker_has_one_example(server: RanksOf) -> None:
    told = verdicts_of(server, "replicate", ["mean", "clean"], shares=(1, 1))
    assert told["clean"]["ok"] and not told["clean"]["causes"]
    assert "loss_sum returns a mean" in " ".join(told["mean"]["causes"])


def test_one_worker_finds_what_two_halves_of_its_batch_show() -> None:
    named = {}
    for name in ("clean", "own batch norm", "batch norm", "mean", "buffer"):
        verdict = verify_program(planted_program(name), alone(), "replicate", whole_batch())
        named[name] = (verdict.ok, " ".join(verdict.causes))
    assert named["clean"] == named["own batch norm"] == (True, "")
    assert not named["batch norm"][0] and "between.0: BatchNorm" in named["batch norm"][1]
    assert not named["mean"][0] and "returns a mean" in named["mean"][1]
    assert not named["buffer"][0] and "the buffer between.0.center is changed" in named["buffer"][1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shard optimizer", "shard parameters"])
def test_sharded_layouts_are_verified_as_well(server: RanksOf, layout: str) -> None:
    told = verdicts_of(server, layout, ["clean", "own batch norm", "dropout", "unused", "batch norm", "mean"])
    assert {name: one["ok"] for name, one in told.items()} == {
        "clean": True, "own batch norm": True, "dropout": True, "unused": True, "batch norm": False, "mean": False,
    }  # fmt: skip
    assert "with it the gradients are equal here" in told["batch norm"]["text"]
    assert "returns a mean" in told["mean"]["text"]
