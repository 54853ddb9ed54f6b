"""An export is loaded by transformers with the same scores, and read back by plait bit for bit."""

from __future__ import annotations

import errno
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from plait.checkpoint.durable import is_full_disk
from plait.checkpoint.store import checkpoint_for, publish, staging_for
from plait.checkpoint.transfer import TensorSlice, write_rank
from plait.commands.answering.chat import open_chat
from plait.commands.export import write_export
from plait.commands.models.opened_model import open_model
from plait.commands.preparing.base import keep_base_files
from plait.data.conversations.chat_template import PLAIN_TEMPLATE, ChatTemplate, find_template
from plait.data.preparation.build import DataRequest
from plait.data.preparation.prepare import prepare_corpus
from plait.data.preparation.tokens import encode_alike
from plait.data.sources import Source
from plait.errors import PlaitError, disk_advice, is_out_of_space
from plait.interop.base_model import read_base_model
from plait.interop.read_weights import load_model_from
from plait.layout import Layout
from plait.model.gpt import GPT
from plait.model.parts.latent_attention import LatentAttentionShape
from plait.model.rope_scaling import RopeScaling
from plait.model.shape import ModelShape
from plait.partition.boxes import weight_boxes
from plait.planner.plan_file import write_plan
from plait.run_folder import run_folder
from plait.screen.screen import SilentScreen
from plait.working_folder import WorkingFolder
from tests.commands.test_commands_adapters import adapter_run
from tests.interop.folders import write_model
from tests.interop.tokenizer_folders import write_tokenizer
from tests.matrix import few_fast
from tests.trainer.tiny import make_tiny

TWO_RANKS = Layout(tensor=2)
CHANGES: dict[str, dict[str, object]] = {
    "llama": {},
    "gpt2": {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": "all", "tied": True},
    "qwen2": {"bias": "qkv", "tied": True, "windows": (0, 4), "rope": RopeScaling(kind="linear", factor=2.0)},
    "qwen3": {"qk_norm": True, "head_width": 12, "norm_eps": 1e-6},
    "deepseek_v3": {
        "latent": LatentAttentionShape(key_value_rank=5, query_rank=6, rope_width=4, value_width=3),
        "head_width": 6,
        "rope": RopeScaling(kind="linear", factor=2.0),
    },
    "mistral": {"windows": (5, 5), "rope": RopeScaling(kind="yarn", factor=4.0, original_sequence=4)},
}


def saved_run(folder: Path, *overrides: str, **changes: object) -> tuple[WorkingFolder, GPT]:
    """A run with one checkpoint that two ranks of `tensor` wrote, and the model that it holds."""
    working = WorkingFolder(folder)
    own = run_folder("tiny", working).path
    own.mkdir(parents=True)
    _, plan = make_tiny(own, "run.name=tiny", *overrides)
    plan = replace(plan, job=replace(plan.job, shape=replace(plan.job.shape, **changes)))
    write_plan(plan, own / "plan.json")
    model = random_weights(plan.job.shape)
    staging = staging_for(own / "checkpoints", 3)
    for rank in range(2):
        boxes = weight_boxes(plan.job.shape, TWO_RANKS, TWO_RANKS.coordinates(rank))
        slices = {name: cut(model, name, box.offset, box.extent) for name, box in boxes.items()}
        once = {f"model/{name}": one for name, one in slices.items() if rank == 0 or one.tensor.shape != one.shape}
        write_rank(staging, rank, once)
    publish(
        staging, checkpoint_for(own / "checkpoints", 3), step=3, cursor=9, model=plan.job.shape.to_dict(), world_size=2
    )
    return working, model


def random_weights(shape: ModelShape) -> GPT:
    torch.manual_seed(4)
    model = GPT(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def cut(model: GPT, name: str, offset: tuple[int, ...], extent: tuple[int, ...]) -> TensorSlice:
    whole = model.get_parameter(name).detach()
    part = whole[tuple(slice(at, at + size) for at, size in zip(offset, extent, strict=True))]
    return TensorSlice(tensor=part, shape=tuple(whole.shape), offset=offset)


@pytest.mark.parametrize("family", few_fast(CHANGES, "gpt2", "deepseek_v3"))
def test_transformers_loads_it_and_plait_reads_it_back(family: str, tmp_path: Path) -> None:
    working, model = saved_run(tmp_path, **CHANGES[family])
    target = write_export("tiny", Path("out"), screen=SilentScreen(), shard_bytes=20_000, working=working)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == sum(p.numel() for p in model.parameters())
    assert json.loads((target / "config.json").read_text())["model_type"] == family
    back = load_model_from(read_base_model(target), 8, torch.device("cpu"))
    assert back.shape == replace(model.shape, learned_positions=8 if family == "gpt2" else 0)
    for name, parameter in model.named_parameters():
        assert torch.equal(back.get_parameter(name), parameter), name
    tokens_bt = torch.randint(0, 280, (2, 8))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(target).eval()(tokens_bt).logits.flatten(0, 1)
        ours = model.logits(model(tokens_bt))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    text = "a b c d, abcdefgh"
    assert AutoTokenizer.from_pretrained(target)(text)["input_ids"] == open_model("tiny", working).tokenizer.encode(
        text
    )
    assert not list(tmp_path.glob(".*.part"))


def test_a_model_from_nothing_names_the_beginning_that_it_learned(tmp_path: Path) -> None:
    texts = tmp_path / "tokenizer"
    write_tokenizer(texts, "llama 3")
    working, _ = saved_run(tmp_path, f"data.tokenizer={texts}", "model.vocabulary=auto")
    target = write_export("tiny", Path("out"), screen=SilentScreen(), working=working)
    theirs = AutoTokenizer.from_pretrained(target)
    assert theirs("a")["input_ids"][0] == theirs.bos_token_id == theirs.convert_tokens_to_ids("<|begin_of_text|>")
    for file in ("config.json", "generation_config.json"):
        assert json.loads((target / file).read_text())["bos_token_id"] == theirs.bos_token_id, file


def test_a_smaller_dtype_rounds_each_weight_once(tmp_path: Path) -> None:
    working, model = saved_run(tmp_path)
    target = write_export("tiny", Path("out"), dtype="bfloat16", screen=SilentScreen(), working=working)
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    found = load_file(target / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(found, model.get_parameter("layers.1.feedforward.down.weight").bfloat16())


def test_what_came_with_the_base_goes_on_with_the_export(tmp_path: Path) -> None:
    working, _ = saved_run(tmp_path)
    base = tmp_path / "base"
    write_model(base, max_position_embeddings=4096, bos_token_id=7)
    (base / "LICENSE").write_text("as you like")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    keep_base_files(str(base), run_folder("tiny", working).base)
    target = write_export("tiny", Path("out"), screen=SilentScreen(), working=working)
    assert (target / "LICENSE").read_text() == "as you like"
    config = json.loads((target / "config.json").read_text())
    assert (config["max_position_embeddings"], config["bos_token_id"]) == (4096, 7)
    assert not (target / "chat_template.jinja").exists()  # the run's tokenizer is another one
    card = (target / "README.md").read_text()
    assert "3 steps of" in card and "rows.jsonl" in card and "LICENSE" in card and str(tmp_path) not in card


CHAT = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
LEARNT = "User:\na b\n\nAssistant:\nc d<|endoftext|>\n\n"


def learns_chats(working: WorkingFolder, run: str = "tiny") -> Path:
    """Let the run's corpus be one of chats; returns the folder of its tokenizer, which has no template."""
    folder = run_folder(run, working)
    plan = folder.saved_plan()
    tokenizer = working.path / plan.job.corpus
    (working.path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    sources = (Source(str(working.path / "chats.jsonl")),)
    request = DataRequest(sources=sources, tokenizer=str(tokenizer), vocabulary=None, holdout=0.0)
    corpus = prepare_corpus(request, working.cache, lambda *_: None)
    write_plan(replace(plan, job=replace(plan.job, corpus=str(corpus))), folder.path / "plan.json")
    return tokenizer


def test_a_run_of_chats_is_exported_with_the_template_that_it_learnt_by(tmp_path: Path) -> None:
    working, _ = saved_run(tmp_path)
    learns_chats(working)
    target = write_export("tiny", Path("out"), screen=SilentScreen(), working=working)
    assert (target / "chat_template.jinja").read_text() == PLAIN_TEMPLATE
    assert AutoTokenizer.from_pretrained(target).apply_chat_template(CHAT, tokenize=False) == LEARNT
    assert open_chat(str(target), working=working).messages == []


@pytest.mark.parametrize("eos", few_fast([None, "a", "<|endoftext|>"], "a"))
def test_the_template_writes_what_was_learnt_whatever_the_base_calls_its_end(eos: str | None, tmp_path: Path) -> None:
    working, _ = saved_run(tmp_path)
    tokenizer, base = learns_chats(working), tmp_path / "base"
    write_model(base)
    shutil.copy(tokenizer / "tokenizer.json", base)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **({"eos_token": eos} if eos else {})}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    keep_base_files(str(base), run_folder("tiny", working).base)
    target = write_export("tiny", Path("out"), screen=SilentScreen(), working=working)
    theirs = AutoTokenizer.from_pretrained(target)
    assert theirs.apply_chat_template(CHAT, tokenize=False) == LEARNT and theirs.eos_token == "<|endoftext|>"
    found = find_template([target])
    assert found and ChatTemplate(found).render_marked(CHAT) == (LEARNT, ((22, 38),))


def test_an_adapter_brings_the_template_that_it_learnt_by(tmp_path: Path) -> None:
    working = WorkingFolder(tmp_path)
    adapter_run(tmp_path, "first", 5)
    learns_chats(working, "first")
    target = write_export("first", Path("out"), what="adapter", screen=SilentScreen(), working=working)
    assert AutoTokenizer.from_pretrained(target).apply_chat_template(CHAT, tokenize=False) == LEARNT


def test_a_template_of_the_base_stays_as_it_is(tmp_path: Path) -> None:
    working, _ = saved_run(tmp_path)
    tokenizer, base = learns_chats(working), tmp_path / "base"
    write_model(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, base)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    keep_base_files(str(base), run_folder("tiny", working).base)
    target = write_export("tiny", Path("out"), screen=SilentScreen(), working=working)
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_template_that_the_recipe_names_is_exported_in_place_of_the_bases(tmp_path: Path) -> None:
    working, _ = saved_run(tmp_path)
    tokenizer, base = learns_chats(working), tmp_path / "base"
    write_model(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, base)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    keep_base_files(str(base), run_folder("tiny", working).base)
    recipe = run_folder("tiny", working).path / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('chat_template = "auto"', 'chat_template = "/gone/own.jinja"'))
    assert "/gone/own.jinja" in recipe.read_text()
    target = write_export("tiny", Path("out"), screen=SilentScreen(), working=working)
    assert AutoTokenizer.from_pretrained(target).apply_chat_template(CHAT, tokenize=False) == LEARNT


def test_a_model_of_no_family_is_refused(tmp_path: Path) -> None:
    working, _ = saved_run(tmp_path, activation="relu2")
    with pytest.raises(PlaitError, match=r"no family of transformers has models of this kind.*the nearest is llama"):
        write_export("tiny", Path("out"), screen=SilentScreen(), working=working)
    assert not (tmp_path / "out").exists()


def test_a_dtype_that_is_none_is_refused(tmp_path: Path) -> None:
    working, _ = saved_run(tmp_path)
    with pytest.raises(PlaitError, match="dtype = fp8 is none of float32, bfloat16, float16"):
        write_export("tiny", Path("out"), dtype="fp8", screen=SilentScreen(), working=working)


@pytest.mark.parametrize(
    ("to", "sentence"),
    [
        ("runs", "runs exists already; name a new folder"),
        ("dangling.gguf", "dangling.gguf exists already; name a new file"),
        ("nowhere/out", "there is no folder nowhere to export into; make it first"),
    ],
)
def test_a_name_that_is_there_or_cannot_be_is_refused(to: str, sentence: str, tmp_path: Path) -> None:
    working, _ = saved_run(tmp_path)
    (tmp_path / "dangling.gguf").symlink_to("nothing")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(PlaitError, match=sentence):
        write_export("tiny", Path(to), screen=SilentScreen(), working=working)
    assert sorted(tmp_path.rglob("*")) == before


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    working, _ = saved_run(tmp_path)
    with largest_file(30_000), pytest.raises(PlaitError, match=r"cannot be written.*export again") as refused:
        write_export("tiny", Path("out"), screen=SilentScreen(), working=working)
    assert refused.value.exit_code == 2
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*.part"))


def test_a_full_disk_without_an_error_number_is_known_as_one() -> None:
    """numpy, by which GGUF files and shards are written, names none."""
    with pytest.raises(OSError, match="10000 requested and 0 written") as caught:
        np.zeros(10_000).tofile("/dev/full")
    assert caught.value.errno is None and is_out_of_space(caught.value) and is_full_disk(caught.value)
    assert disk_advice(caught.value) == "free some space"
    assert is_out_of_space(OSError("Not enough free space to write 80000 bytes"))
    assert not is_out_of_space(OSError("10 requested of 5")) and not is_full_disk(OSError(errno.EACCES, "denied"))


GGUF_SHAPE: dict[str, object] = {"width": 64, "head_width": 32, "ffn": 96}
"""Rows that blocks of 32 divide."""
GGUF_CHANGES: dict[str, dict[str, object]] = {
    "llama": {**GGUF_SHAPE, "tied": False},
    "gpt2": {**CHANGES["gpt2"], **GGUF_SHAPE},
    "qwen2": {"bias": "qkv", "tied": True, **GGUF_SHAPE},
    "qwen3": {**CHANGES["qwen3"], **GGUF_SHAPE, "head_width": 64},
}


@pytest.mark.parametrize("family", few_fast(GGUF_CHANGES, "llama"))
def test_a_gguf_file_is_read_back_as_it_was(family: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    working, model = saved_run(tmp_path, **GGUF_CHANGES[family])
    text, own = "a b c d, abcdefgh 12", open_model("tiny", working).tokenizer
    target = write_export("tiny", Path("whole.gguf"), screen=SilentScreen(), working=working)
    back = open_model(target.name, working)
    for name, parameter in model.named_parameters():
        assert torch.equal(back.model.get_parameter(name), parameter), name
    assert back.tokenizer.encode(text) == own.encode(text) and back.tokenizer.eot == own.eot
    assert back.tokenizer.hash != own.hash and encode_alike(
        own, back.tokenizer, [text]
    )  # so it is measured on held-out text
    write_export("tiny", Path("small.gguf"), dtype="q8_0", screen=SilentScreen(), working=working)
    tensors = {one.name: one for one in gguf.GGUFReader(tmp_path / "small.gguf").tensors}
    down = tensors["blk.1.ffn_down.weight"]
    assert down.tensor_type.name == "Q8_0" and tensors["output_norm.weight"].tensor_type.name == "F32"
    numbers = torch.from_numpy(gguf.quants.dequantize(down.data, down.tensor_type))
    wanted = model.get_parameter("layers.1.feedforward.down.weight").detach().view(-1, 32)
    assert ((numbers.view(-1, 32) - wanted).abs() <= wanted.abs().amax(1, keepdim=True) / 127).all()
    assert not list(tmp_path.glob(".*.part"))


def test_a_llamas_stretched_positions_are_written_as_llama_cpp_takes_them(tmp_path: Path) -> None:
    """As what each pair's frequency is divided by: 1 for fast pairs, the factor for slow ones."""
    gguf = pytest.importorskip("gguf")
    rope = RopeScaling(kind="llama3", factor=8.0, original_sequence=64)
    working, _ = saved_run(tmp_path, **GGUF_SHAPE, rope=rope)
    write_export("tiny", Path("long.gguf"), screen=SilentScreen(), working=working)
    (found,) = [one for one in gguf.GGUFReader(tmp_path / "long.gguf").tensors if one.name == "rope_freqs.weight"]
    assert len(found.data) == 16 and found.data[0] == 1.0 and found.data[-1] == 8.0
    assert all(found.data[1:] >= found.data[:-1])
    with pytest.raises(PlaitError, match="stretches its rotary positions"):
        open_model("long.gguf", working)


def test_a_gguf_file_has_the_template_and_the_ends_of_what_was_learnt(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    working, _ = saved_run(tmp_path)
    learns_chats(working)
    write_export("tiny", Path("chat.gguf"), dtype="float16", screen=SilentScreen(), working=working)
    reader = gguf.GGUFReader(tmp_path / "chat.gguf")
    assert reader.get_field("tokenizer.chat_template").contents() == PLAIN_TEMPLATE
    eos = reader.get_field("tokenizer.ggml.eos_token_id").contents()
    assert reader.get_field("tokenizer.ggml.tokens").contents(eos) == "<|endoftext|>"


@pytest.mark.parametrize(
    ("to", "dtype", "what", "changes", "words"),
    [
        ("a.gguf", "q4_k_m", "model", {}, "llama-quantize a.gguf SMALL.gguf Q4_K_M"),
        ("a", "q8_0", "model", {}, "q8_0 is for a file whose name ends with .gguf"),
        ("a.gguf", "float16", "model", {"windows": (0, 4)}, "differs from llama in windows"),
    ],
)
def test_what_no_gguf_file_can_hold_is_refused(
    to: str, dtype: str, what: str, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    working, _ = saved_run(tmp_path, **changes)
    with pytest.raises(PlaitError, match=words):
        write_export("tiny", Path(to), dtype=dtype, screen=SilentScreen(), working=working)
    assert not (tmp_path / to).exists() and not list(tmp_path.glob(".*.part"))
