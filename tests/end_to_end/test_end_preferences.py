"""DPO from the command line: two workers learn which answer is preferred, the reference is computed once and kept, and
a killed run goes on bit for bit, on one worker too."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.command import Ended, Place, ended, kill_group, wait_while_running
from tests.end_to_end.conftest import RunWarm
from tests.end_to_end.pair import Pair
from tests.interop.folders import write_model

RECIPE = """
[model]
from = "base"

[finetune]
method = "lora"
rank = 4
objective = "dpo"

[data]
files = "pairs.jsonl"
holdout = 0.2

[train]
sequence = 128
batch_tokens = 512
budget = "2 epochs"
matmul_backend = "default"

[optimizer]
lr = 0.02

[layout]
replicate = 2
"""
STRICT = "data.bad_records=0"
EVEN_PAIRS = ("balance.every=never", "layout.micro_sequences=2", "train.matmul_backend=default")
"""What a measurement of busy hosts would change: their shares, and the library of the matrix products."""


def pair(number: int) -> dict[str, object]:
    word = ("yes", "no", "hello", "what", "why")[number % 5]
    asked = [{"role": "user", "content": f"{word} {number}?"}]
    chosen, rejected = f"{word}!", f"{word} " * (1 + number % 2) + "?"
    sides = {"chosen": chosen, "rejected": rejected}
    return {"prompt": asked, **{key: [{"role": "assistant", "content": text}] for key, text in sides.items()}}


@pytest.fixture
def home(tmp_path: Path) -> Place:
    write_model(tmp_path / "base", max_position_embeddings=128)
    rows = [json.dumps(pair(number)) for number in range(100)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "go.toml").write_text(RECIPE)
    return Place(tmp_path)


def run(home: Place, *arguments: str) -> Ended:
    told = ended(home.start(*arguments))
    assert told.code == 0, told
    return told


def numbers(home: Place, name: str) -> list[dict[str, object]]:
    """Metrics without the clock's part."""
    clock = ("step_s", "tokens_per_s", "mfu", "data_wait_s")
    return [{key: value for key, value in line.items() if key not in clock} for line in home.lines(name)]


def references(home: Place) -> list[Path]:
    return sorted(home.folder.glob("**/data/*/reference-*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_pairs_are_shown_learnt_from_and_measured(home: Place, run_warm: RunWarm, method: str) -> None:
    shown = run_warm(home, "data", "go.toml", "--show", "1").out
    assert "chosen   of pair 1 of" in shown and "rejected of pair 1 of" in shown and "whole pairs" not in shown
    more = () if method == "lora" else ("finetune.method=full", "finetune.rank=auto", "optimizer.lr=0.003")
    told = run(home, "train", "go.toml", "run.name=go", *more).out
    assert "reference log-probabilities of 100 pairs" in told and "pairs ranked right" in told
    steps = [line for line in home.lines("go") if "loss" in line]
    (*_, held_out) = [line for line in home.lines("go") if "eval_loss" in line]
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3) and steps[0]["reward_margin"] == pytest.approx(
        0, abs=1e-3
    )
    assert steps[-1]["loss"] < 0.5 and steps[-1]["pair_accuracy"] > 0.9 and steps[-1]["reward_margin"] > 0.3
    assert held_out["eval_loss"] < 0.6 and held_out["pair_accuracy"] > 0.8 and "eval_nats_per_byte" not in held_out
    refused = run_warm(home, "eval", "go")
    assert refused.code == 2 and "held out pairs of answers" in refused.sentence()
    assert len(references(home)) == 1


@pytest.mark.slow
def test_kill_9_and_go_on_bit_for_bit_with_the_kept_reference(home: Place) -> None:
    often = ("checkpoint.every=3 steps", "train.budget=4 epochs", "report.evaluate=10 steps", "--no-check")
    run(home, "train", "go.toml", "run.name=whole", *often)
    steps = home.plan("whole")["steps"]
    (kept,) = references(home)
    bits = kept.read_bytes()
    process = home.start("train", "go.toml", "run.name=killed", *often)
    wait_while_running(lambda: max(home.checkpoints("killed"), default=0) >= 6, process)
    kill_group(process, signal.SIGKILL)
    assert ended(process).code == -signal.SIGKILL
    home.assert_nobody_left()
    assert home.checkpoints("killed")[-1] < steps
    again = run(home, "train", "go.toml", "run.name=killed", *often)
    assert not again.err and "resume   from step-" in again.out and "reference log-probabilities" not in again.out
    assert numbers(home, "killed") == numbers(home, "whole")
    assert home.manifest("killed", steps) == home.manifest("whole", steps)
    assert references(home) == [kept] and kept.read_bytes() == bits


@pytest.mark.slow
def test_one_worker_goes_on_with_what_two_began_and_makes_the_reference_anew_where_it_is_gone(home: Place) -> None:
    fixed = ("optimizer.schedule=constant", "optimizer.warmup_steps=2", "--no-check")
    run(home, "train", "go.toml", "run.name=two", "train.budget=12 steps", *fixed)
    home.copy_run("two", "one")
    home.copy_run("two", "anew")
    longer = ("train.budget=20 steps", *fixed)
    run(home, "train", "go.toml", "run.name=two", *longer)
    alone = ("layout.replicate=1", *longer)
    told = run(home, "train", "go.toml", "run.name=one", *alone)
    assert "resume   from step-12" in told.out and "reference log-probabilities" not in told.out
    (kept,) = references(home)
    kept.unlink()
    told = run(home, "train", "go.toml", "run.name=anew", *alone)
    assert "resume   from step-12" in told.out and "reference log-probabilities" in told.out and kept.exists()
    losses = {
        name: {line["step"]: line["loss"] for line in home.lines(name) if "loss" in line}
        for name in ("one", "two", "anew")
    }
    for name in ("one", "anew"):
        assert losses[name].keys() == losses["two"].keys() and max(losses[name]) == 20
        assert losses[name][13] == pytest.approx(losses["two"][13], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "override", "words"),
    [
        ({"rejected": "yes!", "chosen": "yes!", "prompt": "a"}, STRICT, "pairs.jsonl:1: the chosen and the rejected"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, STRICT, "pairs.jsonl:1: the chosen answer is empty"),
        ({"prompt": "a", "rejected": "b"}, STRICT, 'pairs.jsonl:1 has no column "chosen"'),
        ({"prompt": "a" * 70, "chosen": "b", "rejected": "c"}, "", "1 pair is longer than a window of 128 tokens"),
        (None, "data.overlong=cut", "would compare answers without their ends"),
        (None, "data.format=chat", 'learns from pairs and data.format = "chat" has none'),
        (None, "finetune.objective=sft", "data.files hold pairs of answers"),
        (None, "finetune.beta=0", "finetune.beta is not usable"),
        (None, "finetune.margin=1", 'margin goes with objective = "simpo"'),
    ],
)  # fmt: skip
def test_what_cannot_be_learnt_is_one_sentence_before_a_worker_starts(
    home: Place, run_warm: RunWarm, change: dict[str, str] | None, override: str, words: str
) -> None:
    if change is not None:
        rows = (home.folder / "pairs.jsonl").read_text().splitlines()
        (home.folder / "pairs.jsonl").write_text("\n".join([json.dumps(change), *rows]) + "\n")
    told = run_warm(home, "train", "go.toml", *([override] if override else []))
    assert told.code == 2 and words in told.sentence(), told
    assert not (home.folder / "runs" / "go" / "checkpoints").exists()


@pytest.mark.slow
def test_two_hosts_that_share_no_folder_have_the_bits_of_one(
    home: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each host keeps the reference for itself; a worker that is killed does not lose it."""
    further = tmp_path_factory.mktemp("other")
    pair_of_hosts = Pair(home, Place(further), further / "secret")
    run(home, "train", "go.toml", "run.name=one", "--no-check", *EVEN_PAIRS)
    asked = ("train", "go.toml", "run.name=two", *EVEN_PAIRS, "recover.state_every=2")
    lead, guest = pair_of_hosts.start_command(*asked), pair_of_hosts.start_join()
    wait_while_running((home.path("two") / "metrics.jsonl").exists, lead)
    os.kill(pair_of_hosts.other.rank_process("two", 1), signal.SIGKILL)
    first, second = ended(lead), ended(guest)
    assert (first.code, second.code) == (0, 0) and not first.err + second.err, (first, second)
    assert numbers(home, "two") == numbers(home, "one")
    pair_of_hosts.assert_nothing_left()
