"""An export of a run of chats says where answers end: transformers' generate() stops there, and so does plait."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from plait.commands.answering.chat import AnswerSettings, open_chat
from plait.commands.export import write_export
from plait.commands.preparing.base import keep_base_files
from plait.commands.sample import sample
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.sources import Source
from plait.errors import PlaitError
from plait.planner.plan_file import write_plan
from plait.run_folder import run_folder
from plait.screen.screen import SilentScreen
from plait.working_folder import WorkingFolder
from tests.commands.test_commands_adapters import adapter_run
from tests.commands.test_commands_export import saved_run
from tests.interop.folders import write_model, write_tokenizer
from tests.matrix import few_fast, slow
from tests.plans import changed

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
END_OF_TEXT, IM_END, LETTER = 256, 258, 71
HOW: dict[str, Any] = {"tokens": 5, "temperature": 0, "top_p": 1.0, "seed": 1}


def write_chatml_tokenizer(folder: Path, template: str = CHATML) -> None:
    """The tokenizer of bytes with ChatML's two tokens; its eos_token stays <|endoftext|>."""
    write_tokenizer(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    assert (backend.token_to_id("<|endoftext|>"), backend.token_to_id("<|im_end|>")) == (END_OF_TEXT, IM_END)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)


def learns(working: WorkingFolder, run: str, tokenizer: Path, rows: list[dict[str, object]]) -> None:
    """Let the corpus of a run be these rows in the tokens of a folder, which the run keeps as its base."""
    folder = run_folder(run, working)
    (working.path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Source(str(working.path / "rows.jsonl"))
    request = DataRequest(sources=(source,), tokenizer=str(tokenizer), vocabulary=None, holdout=0.0)
    corpus = prepare_corpus(request, working.cache, lambda *_: None)
    write_plan(
        changed(folder.saved_plan(), corpus=str(corpus)),
        folder.path / "plan.json",
    )
    keep_base_files(str(tokenizer), folder.base)


def exported(
    folder: Path, *, rows: list[dict[str, object]], eos: object = END_OF_TEXT, generation: object = None, **changes: str
) -> Path:
    """A whole run on a base of ChatML whose config.json and generation_config.json name these ends; `changes` are
    further settings of its tokenizer."""
    working, _ = saved_run(folder, tied=False)
    base = folder / "base"
    write_model(base)
    write_chatml_tokenizer(base, changes.pop("template", CHATML))
    settings = json.loads((base / "tokenizer_config.json").read_text()) | changes
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    values = json.loads((base / "config.json").read_text()) | {"eos_token_id": eos}
    (base / "config.json").write_text(json.dumps(values))
    (base / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (base / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": generation}))
    learns(working, "tiny", base, rows)
    return write_export("tiny", Path("out"), screen=SilentScreen(), working=working)


def always_saying(folder: Path, tokens: list[int]) -> Path:
    """Change the weights of a folder so that its model says these tokens in a circle, the second one after all else."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    let_say(weights, tokens)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def let_say(weights: dict[str, torch.Tensor], tokens: list[int]) -> None:
    """Every weight but those of the norms becomes 0, and what the embedding tells the head is the token to follow."""
    for name, weight in weights.items():
        if not name.endswith("norm.weight"):
            weight.zero_()
    (embedding,) = (weight for name, weight in weights.items() if name.endswith("embed_tokens.weight"))
    (head,) = (weight for name, weight in weights.items() if name.endswith("lm_head.weight"))
    embedding[:, 0] = 1.0
    for dim, token in enumerate(tokens):
        embedding[token] = torch.eye(embedding.shape[1])[dim]
    for dim, token in enumerate([*tokens[1:], tokens[0]]):
        head[token, dim] += 5.0


def generated(model: Any, folder: Path, **how: Any) -> list[int]:
    """The new ids that transformers generates after a question."""
    prompt = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CHAT[:1], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    found = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0, **how)
    return found[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("eos", "generation", "ends"),
    [
        (END_OF_TEXT, None, [IM_END, END_OF_TEXT]),
        slow((END_OF_TEXT, END_OF_TEXT, [IM_END, END_OF_TEXT])),
        slow((65, None, [IM_END, 65, END_OF_TEXT])),
        slow((65, [66, END_OF_TEXT], [IM_END, 66, END_OF_TEXT])),
        slow((None, None, [IM_END, END_OF_TEXT])),
        slow((IM_END, [IM_END, END_OF_TEXT], [IM_END, END_OF_TEXT])),
    ],
)
def test_generate_stops_at_the_end_of_a_learnt_turn(
    eos: object, generation: object, ends: list[int], tmp_path: Path
) -> None:
    target = exported(tmp_path, rows=[{"messages": CHAT}], eos=eos, generation=generation)
    assert GenerationConfig.from_pretrained(target).eos_token_id == ends
    assert AutoTokenizer.from_pretrained(target).eos_token == "<|im_end|>"
    assert json.loads((target / "special_tokens_map.json").read_text())["eos_token"]["content"] == "<|im_end|>"
    if generation is not None:
        assert GenerationConfig.from_pretrained(target).temperature == 0.6
    always_saying(target, [LETTER, IM_END])
    model = AutoModelForCausalLM.from_pretrained(target)
    assert generated(model, target) == [IM_END]  # the prompt ends with a line break, which is followed by it


def test_plait_stops_there_as_well(tmp_path: Path) -> None:
    target = always_saying(exported(tmp_path, rows=[{"messages": CHAT}]), [LETTER, IM_END])
    working = WorkingFolder(tmp_path)
    assert str(sample("out", "Q", working=working, **HOW)) == "Q"
    talk = open_chat("out", AnswerSettings(tokens=5, temperature=0), working=working)
    assert list(talk.say("Q")) == []
    (target / "generation_config.json").unlink()
    said = str(sample("out", "Q", working=working, **HOW))
    assert said.startswith("Q<|im_end|>") and len(said) > 20  # what it said before the file named the end


@pytest.mark.parametrize("eos", few_fast([65, None, END_OF_TEXT], 65))
def test_a_run_of_prompts_and_completions_ends_with_the_end_of_a_text(eos: int | None, tmp_path: Path) -> None:
    target = exported(tmp_path, rows=[{"prompt": "a b", "completion": "c"}], eos=eos)
    ends = GenerationConfig.from_pretrained(target).eos_token_id
    assert ends == ([65, END_OF_TEXT] if eos == 65 else END_OF_TEXT)
    assert AutoTokenizer.from_pretrained(target).eos_token == "<|endoftext|>"
    always_saying(target, [LETTER, END_OF_TEXT])
    assert generated(AutoModelForCausalLM.from_pretrained(target), target) == [END_OF_TEXT]


def test_a_template_that_writes_its_own_end_of_text_keeps_it(tmp_path: Path) -> None:
    template = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    target = exported(tmp_path, rows=[{"messages": CHAT}], template=template)
    theirs = AutoTokenizer.from_pretrained(target)
    assert theirs.apply_chat_template(CHAT, tokenize=False).endswith("c d<|im_end|>\n<|endoftext|>")
    assert GenerationConfig.from_pretrained(target).eos_token_id == [IM_END, END_OF_TEXT]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkingFolder]:
    working = WorkingFolder(tmp_path_factory.mktemp("adapter"))
    adapter_run(working.path, "first", 5)
    write_chatml_tokenizer(run_folder("first", working).path / "base")
    learns(working, "first", run_folder("first", working).path / "base", [{"messages": CHAT}])
    yield working


@pytest.mark.parametrize("what", ["adapter", "merged"])
def test_adapters_name_it_alone_and_merged(what: Any, adapter: WorkingFolder) -> None:
    target = write_export("first", Path(what), what=what, screen=SilentScreen(), working=adapter)
    assert GenerationConfig.from_pretrained(target).eos_token_id == [IM_END, 2, END_OF_TEXT]  # 2 is its base's
    assert AutoTokenizer.from_pretrained(target).eos_token == "<|im_end|>"
    card = (target / "README.md").read_text()
    assert "ends with the token `<|im_end|>`" in card and ("eos_token_id=" in card) == (what == "adapter")
    model: Any = AutoModelForCausalLM.from_pretrained(target)  # the adapter by PEFT, beside the base that it names
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # it was tied
    let_say({name: weight.data for name, weight in model.named_parameters()}, [LETTER, IM_END])
    if what == "adapter":
        assert generated(model, target) == [IM_END, LETTER, IM_END, LETTER, IM_END]  # the base's settings
        assert generated(model, target, generation_config=GenerationConfig.from_pretrained(target)) == [IM_END]
    else:
        assert generated(model, target) == [IM_END]


def test_a_damaged_generation_config_is_one_sentence(tmp_path: Path) -> None:
    target = exported(tmp_path, rows=[{"messages": CHAT}])
    for text in ("{", "[]"):
        (target / "generation_config.json").write_text(text)
        with pytest.raises(PlaitError, match=r"generation_config\.json .*download it again, or remove it"):
            sample("out", "Q", working=WorkingFolder(tmp_path), **HOW)
