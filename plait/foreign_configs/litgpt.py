"""litgpt's YAML for pretraining and finetuning."""

from __future__ import annotations

from typing import Any

from plait.errors import PlaitError
from plait.foreign_configs.keys import (
    ConfigFormat,
    KeyFields,
    Values,
    amount,
    as_written,
    fields_of_keys,
    is_on,
    whole,
    whole_or_none,
    word,
)
from plait.model.adapter_shape import AdapterTarget

_FIELDS: KeyFields = {
    "model_name": ("model", as_written),
    "train.micro_batch_size": ("micro_sequences", whole),
    "train.global_batch_size": ("batch_sequences", whole),
    "train.max_seq_length": ("sequence", whole_or_none),
    "train.epochs": ("epochs", amount),
    "train.max_steps": ("steps", whole_or_none),
    "train.max_tokens": ("tokens", whole_or_none),
    "devices": ("per_node", whole),
    "lora_r": ("adapter_rank", whole_or_none),
}
_TARGETS: dict[str, tuple[AdapterTarget, ...]] = {
    "lora_query": ("attention.q",),
    "lora_key": ("attention.k",),
    "lora_value": ("attention.v",),
    "lora_projection": ("attention.o",),
    "lora_mlp": ("feedforward.gate", "feedforward.up", "feedforward.down"),
}
_MODEL_FIELDS: KeyFields = {
    "model_config.n_layer": ("layers", whole),
    "model_config.n_embd": ("width", whole),
    "model_config.n_head": ("heads", whole),
    "model_config.n_query_groups": ("kv_heads", whole),
    "model_config.head_size": ("head_width", whole),
    "model_config.intermediate_size": ("ffn", whole),
    "model_config.padded_vocab_size": ("vocabulary", whole),
    "model_config.vocab_size": ("vocabulary", whole),
}
_PRECISIONS = {
    "bf16-true": ("bf16", "16 bits"),
    "16-true": ("fp16", "16 bits"),
    "bf16-mixed": ("bf16", "float32"),
    "16-mixed": ("fp16", "float32"),
    "32-true": ("float32", "float32"),
}
_EXAMPLES = {"alpaca2k": 2_000 - 100, "alpaca": 51_760 - 2_000}
"""Training examples of litgpt's own data sets, without its validation split."""


def _describe(values: Values, overridden: Values) -> dict[str, Any]:
    found = fields_of_keys(values, _FIELDS, overridden)
    assumed: list[str] = []
    rank = found.pop("adapter_rank", 0)
    if rank:
        targets = tuple(one for key, names in _TARGETS.items() if is_on(values, key) for one in names)
        found |= {"adapter_rank": rank, "adapter_targets": targets or ("attention.q", "attention.v")}
    per_node = found.get("per_node")
    if per_node:
        found["devices"] = per_node * (whole("num_nodes", values.get("num_nodes") or 1) or 1)
    if "model" not in found and values.get("checkpoint_dir") and "model" not in overridden:
        found["model"] = as_written("checkpoint_dir", values["checkpoint_dir"]).removeprefix("checkpoints/")
    shape = fields_of_keys({k: v for k, v in values.items() if k.startswith("model_config.")}, _MODEL_FIELDS)
    if shape:
        found["shape"] = shape
        if values.get("model_config.name") and "model" not in found:
            found["model"] = str(values["model_config.name"])
    said = values.get("precision")
    precision = word("precision", said) if said else "bf16-true"
    if not said:
        assumed.append("precision is bf16-true, which litgpt chooses on GPUs that have bf16")
    if precision not in _PRECISIONS:
        raise PlaitError(f"precision: {precision} is not supported; write {', '.join(_PRECISIONS)}")
    multiplied, weights = _PRECISIONS[precision]
    bits = 0
    if values.get("quantize"):
        quantize = word("quantize", values["quantize"])
        if not quantize.startswith(("bnb.nf4", "bnb.fp4", "bnb.int8")):
            raise PlaitError(
                f"quantize: {quantize} is not supported; plait can price bnb.nf4, bnb.fp4, their -dq, and bnb.int8"
            )
        if not rank:
            raise PlaitError(
                "quantize freezes all weights, so without adapters none would be trained; use finetune_lora"
            )
        bits = 8 if "int8" in quantize else 4
    pretrains = values.get("model_name") is not None or bool(shape)
    if values.get("devices") is None and not pretrains:
        found["devices"] = 1
        assumed.append("devices is 1, litgpt's default for finetuning")
    # "auto", and pretraining that names none: all that there are.
    several = (overridden.get("devices") or found.get("devices", 2)) > 1
    data = str(values.get("data.class_path") or values.get("data") or "").rpartition(".")[2].lower()
    if data in _EXAMPLES and "samples" not in overridden:
        found["samples"] = _EXAMPLES[data]
    optimizer = values.get("optimizer.class_path") or values.get("optimizer")
    if isinstance(optimizer, str):
        found["optimizer"] = optimizer.rpartition(".")[2].lower()
    if not pretrains:
        assumed.append("every example is as long as train.max_seq_length: an upper bound")
    return {
        "program": "litgpt",
        **found,
        "precision": multiplied,
        "weights": weights,
        "quantized_bits": bits,
        # On several devices, all of litgpt shards parameters, and finetuning also recomputes each layer.
        "sharded": "parameters" if several else "nothing",
        "recompute": "full" if several and not pretrains else "none",
        "loss": "all logits",
        "compiled": pretrains,
        "assumed": tuple(assumed),
    }


LITGPT = ConfigFormat(
    name="litgpt YAML",
    known="litgpt",
    marks=("train.micro_batch_size", "train.global_batch_size", "train.max_seq_length"),
    describe=_describe,
    not_priced={
        "lora_head": "an adapter on the head",
        "train.tie_embeddings": "tied embeddings that differ from the model's",
    },
    changes={
        "smaller micro-batch": "train.micro_batch_size: {micro}",
        "larger micro-batch": "train.micro_batch_size: {micro}",
        "quantize": "quantize: bnb.nf4",
        "shard parameters": "devices: {devices}",
        "shorter sequence": "train.max_seq_length: {sequence}",
    },
)
