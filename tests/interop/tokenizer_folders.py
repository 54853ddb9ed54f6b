"""Models' folders whose tokenizers begin texts with a token of their own, or give them a prefix, as Llama's do."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, PreTrainedModel

from tests.interop.random_models import random_model

SHAKESPEARE = (Path(__file__).parents[2] / "recipes" / "shakespeare.txt").read_text(encoding="utf-8")
Kind = Literal["metaspace", "metaspace always", "prepend", "unigram", "byte prefix", "llama 3", "bytes"]
"""How spaces and beginnings are encoded. The first five give a text a prefix, "llama 3" has an end of turn for its end
of text, and "bytes" has neither."""
KINDS: tuple[Kind, ...] = ("metaspace", "metaspace always", "prepend", "unigram", "byte prefix", "llama 3", "bytes")
PREFIXED: tuple[Kind, ...] = KINDS[:5]


def ends_of(kind: Kind) -> tuple[str, str]:
    """The beginning and the end of text."""
    return ("<|begin_of_text|>", "<|eot_id|>") if kind == "llama 3" else ("<s>", "</s>")


def build_tokenizer(kind: Kind, post: Literal["none", "bos", "bytes", "bytes and bos"] = "bos") -> tokenizers.Tokenizer:
    """A tokenizer of this kind, and what it adds to a text."""
    built = tokenizers.Tokenizer.from_str(_trained(kind))
    bos, _ = ends_of(kind)
    begins = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, built.token_to_id(bos))]
    )
    level = processors.ByteLevel(trim_offsets=False)
    chosen: Any = {"bos": begins, "bytes": level, "bytes and bos": processors.Sequence([level, begins])}
    if post != "none":
        built.post_processor = chosen[post]
    return built


@cache
def _trained(kind: Kind) -> str:
    bos, eos = ends_of(kind)
    if kind in ("llama 3", "bytes", "byte prefix"):
        built = tokenizers.Tokenizer(models.BPE())
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "byte prefix")
        built.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer: Any = trainers.BpeTrainer(
            vocab_size=500, special_tokens=[bos, eos], initial_alphabet=alphabet, show_progress=False
        )
    else:
        is_bpe = kind != "unigram"
        built = tokenizers.Tokenizer(
            models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True) if is_bpe else models.Unigram()
        )
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        built.decoder = decoders.Metaspace()
        special = ["<unk>", bos, eos]
        bytes_ = [f"<0x{number:02X}>" for number in range(256)] if is_bpe else []
        trainer = (
            trainers.BpeTrainer(vocab_size=800, special_tokens=[*special, *bytes_], show_progress=False)
            if is_bpe
            else trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False)
        )
    # SentencePiece's own vocabularies have no newline.
    built.train_from_iterator(SHAKESPEARE[:120_000].splitlines(), trainer)
    if kind == "metaspace":
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if kind == "prepend":
        built.pre_tokenizer = None
        built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if kind in ("metaspace", "prepend", "metaspace always"):
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        built.decoder = decoders.Sequence(steps)
    return built.to_str()


def write_tokenizer(folder: Path, kind: Kind, **settings: object) -> tokenizers.Tokenizer:
    """tokenizer.json and tokenizer_config.json with these `settings` more."""
    built, (bos, eos) = build_tokenizer(kind), ends_of(kind)
    folder.mkdir(parents=True, exist_ok=True)
    built.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return built


def write_model(folder: Path, kind: Kind) -> PreTrainedModel:
    """A small Llama with such a tokenizer."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=build_tokenizer(kind).get_vocab_size(),
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = random_model(config)
    model.save_pretrained(folder)
    write_tokenizer(folder, kind)
    return model
