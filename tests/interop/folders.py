"""A small model's folder with a tokenizer of bytes, as Hugging Face's libraries write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def _add_sizes(writer: Any, config: Any) -> None:
    """The fields that a .gguf file of every family has."""
    writer.add_name("small")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def write_gguf(file: Path, model: PreTrainedModel, folder: Path, **fields: str) -> None:
    """A Llama and the tokenizer in `folder` as a .gguf file, as llama.cpp's converter lays them out: queries' and keys'
    rows in the order of interleaved rotary positions. `fields` are texts to add."""
    import gguf

    config: Any = model.config
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    writer = gguf.GGUFWriter(file, "llama")
    _add_sizes(writer, config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    named = [*sorted(vocabulary, key=vocabulary.get), "ab", "12"]
    writer.add_token_list([*named, *(f"<unused{n}>" for n in range(config.vocab_size - len(named)))])
    writer.add_token_merges(["a b", "1 2"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    for key, text in fields.items():
        writer.add_string(key.replace("__", "."), text)
    for name, weight in model.state_dict().items():
        for theirs, ours in GGUF_NAMES.items():
            name = name.replace(theirs, ours)
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for part, count in heads.items():
            if f".{part}." in name:
                halves = weight.reshape(count, 2, -1, weight.shape[1])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(name, weight.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gemma3_gguf(file: Path, model: PreTrainedModel, **fields: float) -> None:
    """A Gemma 3 with a vocabulary of bytes and a few words as a .gguf file, as llama.cpp's converter lays them out: one
    is added to the weights of norms, and runs of spaces are spelled with spaces. `fields` are further ones."""
    import gguf

    config: Any = model.config
    writer = gguf.GGUFWriter(file, "gemma3")
    _add_sizes(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    words = ["▁", "a", "b", "  ", "   ", "ab", "▁a", "▁ab"]
    named = [*special, *(f"<0x{number:02X}>" for number in range(256)), *words]
    kinds = [gguf.TokenType.CONTROL] * len(special) + [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(words)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(named)
    writer.add_token_scores([-1000.0] * len(named))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    for key, value in fields.items():
        writer.add_float32(key.replace("__", "."), value)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        for theirs, ours in {
            **GEMMA3_GGUF_NAMES,
            **GGUF_NAMES,
            "post_attention_layernorm": "post_attention_norm",
        }.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, (weight.float() + name.endswith("norm.weight")).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GEMMA3_GGUF_NAMES = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
