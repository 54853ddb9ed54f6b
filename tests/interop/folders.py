"""A small model's folder with a tokenizer of bytes, as Hugging Face's libraries write them."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from transformers import LlamaConfig, PreTrainedModel

from tests.interop.random_models import random_model

VOCABULARY = 260


def write_tokenizer(folder: Path) -> None:
    """One token a byte and an end of text: 257 entries."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(
        vocab={"<|endoftext|>": 256, **{byte: i for i, byte in enumerate(alphabet)}}, merges=[]
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder: Path, *, shard_size: str = "50GB", **changes: object) -> PreTrainedModel:
    """A small Llama with its tokenizer; `changes` are keys of its config."""
    values = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
    }
    model = random_model(LlamaConfig(**(values | changes)))
    model.save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder)
    return model
