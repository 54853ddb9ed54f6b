"""A model of a folder: measured, trained further on two workers, exported, and loaded again by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.end_to_end.command import Ended, Place, ended
from tests.end_to_end.conftest import RunWarm
from tests.interop.folders import write_model

RECIPE = """
[model]
from = "base"

[data]
files = "text.txt"
holdout = 0.1

[train]
sequence = 32
batch_tokens = 256
budget = "4 steps"
matmul_backend = "default"

[optimizer]
lr = 0.01
warmup_steps = 0

[layout]
tensor = 2
"""


@pytest.fixture
def home(tmp_path: Path) -> Place:
    home = Place(tmp_path)
    write_model(tmp_path / "base")
    (tmp_path / "base" / "LICENSE").write_text("as you like")
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question. " * 150)
    (tmp_path / "go.toml").write_text(RECIPE)
    return home


def run(home: Place, *arguments: str) -> Ended:
    told = ended(home.start(*arguments))
    assert told.code == 0, told
    return told


@pytest.mark.slow
def test_a_model_goes_in_and_out(home: Place, run_warm: RunWarm) -> None:
    def told(*arguments: str) -> str:
        found = run_warm(home, *arguments)
        assert found.code == 0, found
        return found.out

    before = json.loads(told("eval", "base", "--files", "text.txt", "--sequence", "32"))
    run(home, "train", "go.toml")
    after = json.loads(told("eval", "go", "--files", "text.txt"))
    assert after["tokens"] == before["tokens"] and after["nats_per_token"] < before["nats_per_token"] - 0.1
    first, last = (json.loads(told("eval", *names)) for names in (("base", "--heldout-of", "go"), ("go",)))
    assert first["tokens"] == last["tokens"] > 100 and last["nats_per_token"] < first["nats_per_token"] - 0.1
    told("export", "go", "--to", "mine")
    again = json.loads(told("eval", "mine", "--files", "text.txt", "--sequence", "32"))
    assert again["nats_per_token"] == pytest.approx(after["nats_per_token"], rel=1e-6)
    assert (home.folder / "mine" / "LICENSE").read_text() == "as you like"
    theirs = AutoModelForCausalLM.from_pretrained(home.folder / "mine")
    with torch.no_grad():
        assert torch.isfinite(theirs(torch.tensor([[1, 2, 3]])).logits).all()
    refused = run_warm(home, "export", "go", "--to", "mine")
    assert refused.code == 2 and "name a new folder" in refused.sentence()


def test_a_model_that_does_not_fit_is_one_sentence_before_a_worker_starts(home: Place) -> None:
    config = home.folder / "base" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))
    told = ended(home.start("train", "go.toml"))
    assert told.code == 2 and told.err.count("\n") == 1 and "lacks the weight model.layers.4." in told.err
