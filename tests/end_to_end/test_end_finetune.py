"""LoRA from the command line: two workers learn chats, before and after are measured, the adapter goes out and in."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.command import Ended, Place, ended, kill_group, wait_while_running
from tests.end_to_end.conftest import RunWarm
from tests.interop.folders import write_model

RECIPE = """
[model]
from = "base"

[finetune]
method = "lora"
rank = 4

[data]
files = "chats.jsonl"
holdout = 0.2

[train]
sequence = 64
batch_tokens = 256
budget = "2 epochs"
matmul_backend = "default"

[optimizer]
lr = 0.02

[layout]
replicate = 2
"""


@pytest.fixture
def home(tmp_path: Path) -> Place:
    home = Place(tmp_path)
    write_model(tmp_path / "base")
    chats = [
        [{"role": "user", "content": f"{word} {n}?"}, {"role": "assistant", "content": f"{word}!" * (1 + n % 2)}]
        for n, word in enumerate(["yes", "no", "hello", "what", "why"] * 20)
    ]
    lines = [json.dumps({"messages": messages}) for messages in chats]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "go.toml").write_text(RECIPE)
    return home


def run(home: Place, *arguments: str) -> Ended:
    told = ended(home.start(*arguments))
    assert told.code == 0, told
    return told


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_an_adapter_is_trained_measured_and_handed_on(method: str, home: Place, run_warm: RunWarm) -> None:
    def told(*arguments: str) -> str:
        found = run_warm(home, *arguments)
        assert found.code == 0, found
        return found.out

    (home.folder / "go.toml").write_text(RECIPE.replace('"lora"', f'"{method}"'))
    start = run(home, "train", "go.toml").out
    assert ("learn (lora, rank 4)" if method == "lora" else "learn (lora, rank 4, beside nf4)") in start
    before, after = (json.loads(told("eval", "go", *more)) for more in (("--adapter", "none"), ()))
    assert before["tokens"] == after["tokens"] and after["nats_per_token"] < before["nats_per_token"] - 0.1
    told("export", "go", "--to", "adapter", "--adapter")
    again = json.loads(told("eval", "base", "--heldout-of", "go", "--adapter", "adapter"))
    assert again["nats_per_token"] == pytest.approx(after["nats_per_token"], rel=1e-6)
    texts = told("sample", "go", "--prompt", "yes?", "--tokens", "4", "--adapter", "none", "--adapter", "go")
    assert texts.count("adapter  none\nyes?") == texts.count("adapter  go\nyes?") == 1
    told("export", "go", "--to", "merged", "--merged")
    whole = json.loads(told("eval", "merged", "--heldout-of", "go"))
    assert whole["nats_per_token"] == pytest.approx(after["nats_per_token"], rel=1e-5)
    theirs = AutoModelForCausalLM.from_pretrained(home.folder / "merged")
    with torch.no_grad():
        assert torch.isfinite(theirs(torch.tensor([[1, 2, 3]])).logits).all()
    both = run_warm(home, "export", "go", "--to", "both", "--adapter", "--merged")
    assert both.code == 2 and "two folders" in both.sentence()


@pytest.mark.slow
def test_kill_9_and_go_on_bit_for_bit(home: Place) -> None:
    often = ("checkpoint.every=3 steps", "train.budget=4 epochs", "report.evaluate=10 steps", "--no-check")
    run(home, "train", "go.toml", "run.name=whole", *often)
    steps = home.plan("whole")["steps"]
    process = home.start("train", "go.toml", "run.name=killed", *often)
    wait_while_running(lambda: max(home.checkpoints("killed"), default=0) >= 6, process)
    kill_group(process, signal.SIGKILL)
    assert ended(process).code == -signal.SIGKILL
    home.assert_nobody_left()
    assert home.checkpoints("killed")[-1] < steps
    again = run(home, "train", "go.toml", "run.name=killed", *often)
    assert not again.err and "resume   from step-" in again.out
    assert home.numbers("killed") == home.numbers("whole")
    assert home.manifest("killed", steps) == home.manifest("whole", steps)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "qlora", "dropout"])
def test_one_worker_goes_on_with_the_adapter_that_two_trained(kind: str, home: Place) -> None:
    dropped = '"lora"\ndropout = 0.3'
    (home.folder / "go.toml").write_text(RECIPE.replace('"lora"', dropped if kind == "dropout" else f'"{kind}"'))
    # At the recipe's rate the last bits, in which two workers differ from one, grow to 6e-4 within these steps.
    fixed = ("optimizer.schedule=constant", "optimizer.warmup_steps=2", "optimizer.lr=0.002", "--no-check")
    run(home, "train", "go.toml", "run.name=two", "train.budget=12 steps", *fixed)
    home.copy_run("two", "one")
    longer = ("train.budget=20 steps", *fixed)
    run(home, "train", "go.toml", "run.name=two", *longer)
    alone = run(home, "train", "go.toml", "run.name=one", "layout.replicate=1", *longer)
    assert "resume   from step-12" in alone.out
    losses = {
        name: {line["step"]: line["loss"] for line in home.lines(name) if "loss" in line} for name in ("one", "two")
    }
    assert losses["one"].keys() == losses["two"].keys() and max(losses["one"]) == 20
    assert losses["one"][13] == pytest.approx(losses["two"][13], rel=1e-6)
    assert all(losses["one"][step] == pytest.approx(losses["two"][step], rel=1e-4) for step in range(14, 21))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('finetune.targets=["q_prjo"]', 'did you mean "q_proj"?'),
        ("finetune.rank=17", "finetune.rank = 17 is above the 16 of attention.k's smaller side"),
    ],
)
def test_what_cannot_be_tuned_is_one_sentence_before_a_worker_starts(
    home: Place, run_warm: RunWarm, override: str, words: str
) -> None:
    told = run_warm(home, "train", "go.toml", override)
    assert told.code == 2 and words in told.sentence()
    assert not (home.folder / "runs" / "go" / "checkpoints").exists()
