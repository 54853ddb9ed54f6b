"""Chats from the command line: what is refused, what is shown, and a run of three epochs that is killed and goes on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.end_to_end.command import Place, ended, kill_group, wait_while_running
from tests.end_to_end.conftest import RunWarm

CHATS = Path(__file__).parents[1] / "fixtures" / "chats" / "chatterbot_part.jsonl"
RECIPE = """
[data]
files = "chats.jsonl"
holdout = 0.1

[model]
layers = 2
width = 32
heads = 2
vocabulary = 400

[train]
sequence = 128
batch_tokens = 896
budget = "3 epochs"
matmul_backend = "default"

[layout]
replicate = 2
micro_sequences = 2

[checkpoint]
every = "5 steps"

[report]
evaluate = "10 steps"
"""


def chat(question: str, answer: str) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}) + "\n"


@pytest.fixture
def chats(tmp_path: Path) -> Place:
    place = Place(tmp_path / "place", RECIPE)
    (place.folder / "chats.jsonl").write_text("".join(chat(f"What is {n}?", f"{n} is {n}.") for n in range(100)))
    return place


def test_bad_chats_end_with_one_sentence_and_nothing_written(chats: Place) -> None:
    (chats.folder / "chats.jsonl").write_text(chat("Hi", "Hello.") + chat("Who?", ""))
    for command in ("data", "train"):
        ended = chats.run(command, "tiny.toml")
        assert ended.code == 2
        assert "chats.jsonl:2, message 2: the assistant says nothing" in ended.sentence()
    assert not (chats.folder / "runs").exists()
    assert [path for path in (chats.folder / ".plait" / "data").iterdir() if path.is_dir()] == []


def test_samples_are_shown_with_what_is_learnt(chats: Place) -> None:
    shown = chats.run("data", "tiny.toml", "--show", "2")
    assert shown.code == 0 and not shown.err, shown
    assert "template of chats: plait's plain one, as the tokenizer has none" in shown.out
    assert "⟦like this⟧" in shown.out and "Assistant:\n⟦0 is 0.<|endoftext|>⟧\n" in shown.out
    packing = next(line for line in shown.out.splitlines() if line.startswith("packing  "))
    assert " windows of 128 tokens, " in packing and "% full; the longest example has " in packing


@pytest.mark.slow
def test_examples_longer_than_a_window_are_refused_before_a_worker_starts(chats: Place, run_warm: RunWarm) -> None:
    refused = run_warm(chats, "train", "tiny.toml", "run.name=short", "train.sequence=8", "train.batch_tokens=64")
    assert refused.code == 2 and "longer than a window of 8 tokens" in refused.sentence()
    assert not (chats.path("short") / "plan.json").exists()


@pytest.mark.slow
def test_three_epochs_of_real_chats_on_two_workers_go_on_after_a_kill(tmp_path: Path, run_warm: RunWarm) -> None:
    place = Place(tmp_path / "place", RECIPE)
    (place.folder / "chats.jsonl").write_text(CHATS.read_text(encoding="utf-8"))
    options = ("model.vocabulary=512", "train.sequence=512", "train.batch_tokens=2560", "--no-check")
    whole = place.train("whole", *options)
    assert whole.code == 0 and not whole.err, whole
    steps = place.plan("whole")["steps"]
    process = place.start_training("killed", *options)
    wait_while_running(lambda: bool(place.checkpoints("killed")), process)
    kill_group(process, signal.SIGKILL)
    ended(process)
    assert place.checkpoints("killed")[-1] < steps
    again = place.train("killed", *options)
    assert again.code == 0 and not again.err, again
    assert place.numbers("killed") == place.numbers("whole")
    assert place.manifest("killed", steps) == place.manifest("whole", steps)
    losses = [line["eval_loss"] for line in place.lines("whole") if "eval_loss" in line]
    assert losses[-1] < losses[0]
    # Every learned token of the training part was learned three times, on two workers.
    learned = 0
    folder = place.folder / place.plan("whole")["corpus"]
    for mask in folder.glob("train-*.mask.bin"):
        learned += mask.read_bytes().count(0)
    assert max(line.get("tokens", 0) for line in place.lines("whole")) == 3 * learned > 0
    measured = run_warm(place, "eval", "whole")
    assert measured.code == 0
    assert json.loads(measured.out)["eval_loss"] == pytest.approx(losses[-1], rel=1e-6)
    held = sum(mask.read_bytes().count(0) for mask in folder.glob("heldout-*.mask.bin"))
    assert json.loads(measured.out)["tokens"] == held
    others = run_warm(place, "eval", "whole", "--files", "chats.jsonl")
    assert others.code == 0 and json.loads(others.out)["tokens"] == held + learned
    with (place.folder / "lines.txt").open("w+") as typed:
        typed.write("What is AI?\n")
        typed.seek(0)
        talk = ended(place.start("chat", "whole", "--tokens", "8", stdin=typed))
    assert talk.code == 0 and talk.out.strip(), talk
