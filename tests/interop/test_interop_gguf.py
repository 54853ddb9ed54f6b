"""A .gguf file is converted once, and computes what the model that it was made of computes."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig

from plait.commands.models.opened_model import open_model
from plait.errors import PlaitError
from plait.interop import gguf_out
from plait.interop.gguf_tokenizer import GgufTokenizer
from plait.model.shape import ModelShape, weight_sizes
from plait.working_folder import WorkingFolder
from tests.interop.folders import write_gemma3_gguf, write_gguf, write_model
from tests.interop.random_models import random_model

pytest.importorskip("gguf")


def test_a_gguf_file_computes_what_its_model_computes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    theirs = write_model(tmp_path / "model")
    write_gguf(tmp_path / "small.gguf", theirs, tmp_path / "model", tokenizer__ggml__pre="smollm")
    capfd.readouterr()
    opened = open_model("small.gguf", WorkingFolder(tmp_path))
    assert capfd.readouterr() == ("", ""), "the reader's own bar of progress"
    tokens_bt = torch.randint(0, 257, (2, 24))
    with torch.no_grad():
        wanted = theirs(tokens_bt).logits.flatten(0, 1)
        torch.testing.assert_close(opened.model.logits(opened.model(tokens_bt)), wanted, rtol=0, atol=1e-4)
    assert len(opened.tokenizer.encode("a 12")) == 4  # each digit by itself, whatever the merges say
    assert opened.origin.parent == tmp_path / ".plait" / "models"
    made = (opened.origin / "model.safetensors").stat().st_mtime_ns
    assert open_model("small.gguf", WorkingFolder(tmp_path)).origin == opened.origin
    assert (opened.origin / "model.safetensors").stat().st_mtime_ns == made


def gemma3() -> Any:
    """A small Gemma 3 whose scores are scaled by its head width, as in published ones: the reader's default is 256."""
    config = Gemma3TextConfig(
        vocab_size=269,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,  # one of them without a window
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return random_model(config)


def test_a_gemma_3_as_gguf_computes_what_it_computes_as_a_model(tmp_path: Path) -> None:
    theirs = gemma3()
    write_gemma3_gguf(tmp_path / "gemma.gguf", theirs, gemma3__rope__freq_base_swa=10000.0)
    opened = open_model("gemma.gguf", WorkingFolder(tmp_path))
    tokens_bt = torch.randint(0, 269, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(tokens_bt).logits.flatten(0, 1)
        torch.testing.assert_close(opened.model.logits(opened.model(tokens_bt)), wanted, rtol=0, atol=1e-4)
    tokenizer = opened.tokenizer
    assert tokenizer.bos == (2,) and tokenizer.eot_text == "<eos>"
    assert [tokenizer.backend.id_to_token(token) for token in tokenizer.encode("ab   ab")] == ["ab", "▁▁▁", "ab"]
    write_gemma3_gguf(tmp_path / "capped.gguf", theirs, gemma3__final_logit_softcapping=30.0)
    with pytest.raises(PlaitError, match=r"has gemma3\.final_logit_softcapping = 30\.0, which .* drops"):
        open_model("capped.gguf", WorkingFolder(tmp_path))


def test_what_the_reader_would_drop_or_cannot_read_is_refused(tmp_path: Path) -> None:
    theirs = write_model(tmp_path / "model")
    write_gguf(tmp_path / "long.gguf", theirs, tmp_path / "model", llama__rope__scaling__type="yarn")
    whole = (tmp_path / "long.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "other.gguf").write_bytes(whole.replace(b"llama", b"falco"))
    (tmp_path / "text.gguf").write_text("no model")
    for name, words in {
        "long.gguf": "stretches its rotary positions",
        "cut.gguf": "is not a complete GGUF file",
        "other.gguf": "family 'falco', none of those that plait reads",
        "text.gguf": "is not a complete GGUF file",
        "none.gguf": "there is no file",
    }.items():
        with pytest.raises(PlaitError, match=words):
            open_model(name, WorkingFolder(tmp_path))
    assert not [path for path in (tmp_path / ".plait" / "models").iterdir() if path.is_dir()]


@pytest.mark.parametrize("dtype", ["float32", "q8_0"])
def test_a_tensor_is_written_some_rows_at_a_time(tmp_path: Path, dtype: gguf_out.GgufType) -> None:
    """The same bytes as at once, and never more numbers in memory than asked for, but for whole heads."""
    gguf = pytest.importorskip("gguf")
    shape = ModelShape(layers=1, width=32, heads=4, kv_heads=2, head_width=8, ffn=64, vocabulary=50, sequence=16)
    draw, extents = torch.Generator().manual_seed(1), list[tuple[int, ...]]()
    weights = {name: torch.randn(sizes, generator=draw) for name, sizes in weight_sizes(shape).items()}

    def read(name: str, offset: tuple[int, ...], extent: tuple[int, ...]) -> Tensor:
        extents.append(extent)
        return weights[name][tuple(slice(first, first + count) for first, count in zip(offset, extent, strict=True))]

    tokenizer = GgufTokenizer(pre="smollm", tokens=tuple(map(str, range(50))), types=(1,) * 50, merges=())
    files = [tmp_path / "whole.gguf", tmp_path / "rows.gguf"]
    for file, at_once in zip(files, (1 << 24, 8 * 32 * 3), strict=True):
        extents.clear()
        gguf_out.write_gguf(
            file, shape, dtype, read, tokenizer, name="tiny", special={}, adds_beginning="no", at_once=at_once
        )
    assert files[0].read_bytes() == files[1].read_bytes()
    assert max(prod(extent) for extent in extents) == 8 * 32  # a head
    if dtype == "float32":
        (query,) = [one for one in gguf.GGUFReader(files[1]).tensors if one.name == "blk.0.attn_q.weight"]
        turned = weights["layers.0.attention.q.weight"].view(4, 2, 4, 32).swapaxes(1, 2).reshape(32, 32)
        assert torch.equal(torch.from_numpy(query.data.copy()), turned)
