"""A tokenizer with more tokens than its model: the embedding grows, learns and is exported, or that is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.command import Place
from tests.end_to_end.conftest import RunWarm
from tests.interop.folders import VOCABULARY, write_model

RECIPE = """
[model]
from = "base"

[finetune]
method = "full"

[data]
files = "chats.jsonl"
holdout = 0.2

[train]
sequence = 64
batch_tokens = 256
budget = "8 steps"
matmul_backend = "default"

[optimizer]
lr = 0.01

[layout]
replicate = 2
"""
MARKS = ("<|one|>", "<|two|>", "<|three|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def home(tmp_path: Path) -> Place:
    """A model of 260 rows, whose tokenizer of 257 got six more entries and a template that writes the last three."""
    home = Place(tmp_path, RECIPE)
    write_model(tmp_path / "base")
    file = tmp_path / "base" / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.add_special_tokens(list(MARKS))
    backend.save(str(file))
    (tmp_path / "base" / "chat_template.jinja").write_text(TEMPLATE)
    turns = [[("user", f"What is {n}?"), ("assistant", f"{n} is {n}.")] for n in range(100)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in one]} for one in turns]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


@pytest.mark.slow
def test_adapters_beside_too_small_an_embedding_are_refused_in_one_sentence(home: Place, run_warm: RunWarm) -> None:
    refused = run_warm(home, "train", "tiny.toml", "run.name=adapters", "finetune.method=lora")
    assert refused.code == 2 and not (home.path("adapters") / "plan.json").exists()
    assert "the tokenizer has 263 entries and the model 260: adapters leave the embedding" in refused.sentence()
    assert 'write finetune.modules_to_save = ["embed_tokens", "lm_head"]' in refused.sentence()


@pytest.mark.slow
@pytest.mark.parametrize("head", ["tied", "untied"])
def test_new_tokens_are_learnt_beside_adapters(home: Place, run_warm: RunWarm, head: str) -> None:
    if head == "tied":
        tokenizer = (home.folder / "base" / "tokenizer.json").read_bytes()
        write_model(home.folder / "base", tie_word_embeddings=True)
        (home.folder / "base" / "tokenizer.json").write_bytes(tokenizer)
    saved = '["embed_tokens"]' if head == "tied" else '["embed_tokens", "lm_head"]'
    method = ("finetune.method=lora", "finetune.rank=4", f"finetune.modules_to_save={saved}")
    run = home.train("go", *method, "--no-check")
    assert run.code == 0 and not run.err, run
    assert f"learn (lora, rank 4, embedding{'' if head == 'tied' else ', head'})" in run.out

    def nats(*words: str) -> float:
        return json.loads(run_warm(home, "eval", *words).out)["nats_per_token"]

    own = nats("go")
    base = run_warm(home, "eval", "go", "--adapter", "none")
    assert base.code == 2 and "whose rows are with the run's adapter; use that one" in base.sentence()
    assert run_warm(home, "export", "go", "--to", "adapter", "--adapter").code == 0
    assert run_warm(home, "export", "go", "--to", "merged", "--merged").code == 0
    assert nats("base", "--heldout-of", "go", "--adapter", "adapter") == pytest.approx(own, rel=1e-6)
    assert nats("merged", "--heldout-of", "go") == pytest.approx(own, rel=1e-5)
    peft = pytest.importorskip("peft")
    tokens = torch.tensor([[1, 257, 258, 262]])
    plain = AutoModelForCausalLM.from_pretrained(home.folder / "base")
    plain.resize_token_embeddings(263, mean_resizing=False)
    theirs = peft.PeftModel.from_pretrained(plain, home.folder / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(home.folder / "merged")
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, merged(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_new_tokens_are_learnt_kept_and_exported(home: Place, run_warm: RunWarm) -> None:
    run = home.train("whole", "--why", "--no-check")
    assert run.code == 0 and not run.err, run
    assert "vocabulary 263: 3 rows for tokens that were added to the tokenizer" in " ".join(run.out.split())
    fixed = ("optimizer.schedule=constant", "optimizer.warmup_steps=1", "--no-check")
    half = home.train("half", "train.budget=4 steps", *fixed)
    assert half.code == 0
    rest = home.train("half", *fixed, "layout.replicate=1")
    assert rest.code == 0 and "resume   from step-4" in rest.out
    assert run_warm(home, "export", "whole", "--to", "out").code == 0
    theirs = AutoModelForCausalLM.from_pretrained(home.folder / "out")
    base = AutoModelForCausalLM.from_pretrained(home.folder / "base")
    rows, before = (one.get_input_embeddings().weight.detach() for one in (theirs, base))
    assert rows.shape[0] == theirs.config.vocab_size == 263 and before.shape[0] == VOCABULARY
    assert all(float((row - before.mean(0)).abs().max()) > 1e-4 for row in rows[260:]), "each has learned"
    assert float((rows[260:262] - before.mean(0)).abs().max()) < 0.2, "from the mean on"
    assert len(AutoTokenizer.from_pretrained(home.folder / "out")) == 263
    assert torch.isfinite(theirs(torch.tensor([[1, 257, 258, 262]])).logits).all()
    one, again = (
        json.loads(run_warm(home, "eval", *words).out) for words in (("whole",), ("out", "--heldout-of", "whole"))
    )
    assert one["tokens"] > 0 and again["nats_per_token"] == pytest.approx(one["nats_per_token"], rel=1e-5)
