"""Axolotl's YAML."""

from __future__ import annotations

from typing import Any

from plait.errors import PlaitError
from plait.foreign_configs.adapters import ALL_TARGETS, PEFT_DEFAULT, adapter_targets
from plait.foreign_configs.deepspeed import zero_fields, zero_fields_of_file
from plait.foreign_configs.keys import (
    ConfigFormat,
    KeyFields,
    Values,
    amount,
    as_written,
    fields_of_keys,
    is_on,
    one_of,
    true_or_false,
    whole,
    whole_or_none,
    word,
    words,
)

_FIELDS: KeyFields = {
    "base_model": ("model", as_written),
    "sequence_len": ("sequence", whole),
    "micro_batch_size": ("micro_sequences", whole),
    "gradient_accumulation_steps": ("accumulation", whole),
    "num_epochs": ("epochs", amount),
    "max_steps": ("steps", whole_or_none),
    "optimizer": ("optimizer", word),
    "lora_r": ("adapter_rank", whole_or_none),
    "lora_target_modules": ("lora_target_modules", words),
    "tensor_parallel_size": ("tensor", whole_or_none),
    "context_parallel_size": ("context", whole_or_none),
    "sequence_parallel_degree": ("context", whole_or_none),
    "dp_shard_size": ("shard", whole_or_none),
    "torch_compile": ("compiled", true_or_false),
}
_PIECES = (
    "liger_fused_linear_cross_entropy",
    "cut_cross_entropy",
    "chunked_cross_entropy",
    "unsloth_cross_entropy_loss",
)


def _describe(values: Values, overridden: Values) -> dict[str, Any]:
    found = fields_of_keys(values, _FIELDS, overridden)
    assumed: list[str] = []
    adapter = word("adapter", values["adapter"]) if values.get("adapter") else ""
    if adapter not in ("", "lora", "qlora"):
        raise PlaitError(f"adapter: {adapter} is not supported; plait can price lora and qlora")
    bits = one_of(values, {"load_in_4bit": 4, "load_in_8bit": 8})
    if adapter == "qlora" and bits is None and values.get("load_in_4bit") is None:
        raise PlaitError("adapter: qlora needs load_in_4bit: true; add it, or write adapter: lora")
    if bits and not adapter:
        raise PlaitError(f"load_in_{bits}bit: true quantizes all weights, so none would be trained; add adapter: qlora")
    names = found.pop("lora_target_modules", ())
    if adapter:
        found.setdefault("adapter_rank", 8)
        targets = (
            ALL_TARGETS if is_on(values, "lora_target_linear") else adapter_targets(names) if names else PEFT_DEFAULT
        )
        found |= {"adapter_targets": targets, "quantized_bits": bits or 0}
    else:
        found.pop("adapter_rank", None)
    fsdp = any(
        key in ("fsdp", "fsdp_version") or key.startswith("fsdp_config") for key, value in values.items() if value
    )
    sharded: dict[str, Any] = {}
    inside = {key.removeprefix("deepspeed."): value for key, value in values.items() if key.startswith("deepspeed.")}
    if values.get("deepspeed") or inside:
        if fsdp:
            raise PlaitError("fsdp and deepspeed contradict each other; keep one")
        file = values.get("deepspeed")
        sharded = zero_fields(inside) if inside else zero_fields_of_file("deepspeed", file, overridden, assumed)
    elif fsdp:
        offloads = any(_is_on_at(values, f"fsdp_config.{key}") for key in ("offload_params", "fsdp_offload_params"))
        sharded = {"sharded": "parameters", "offloads_parameters": offloads, "offloads_optimizer": offloads}
    precision = one_of(values, {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"})
    if is_on(values, "fp8"):
        precision = "fp8"
    plugins = str(values.get("plugins") or "")
    pieces = any(_is_on_at(values, key) for key in _PIECES) or "CutCrossEntropy" in plugins
    recompute = "full" if _is_checkpointed(values) else "none"
    attention = "unfused" if is_on(values, "eager_attention") else "flash"
    if values.get("attn_implementation") == "eager":
        attention = "unfused"
    if "samples" not in overridden and "steps" not in found:
        assumed.append("the number of examples is not in the file; give samples=NUMBER for the whole run's time")
    if not is_on(values, "sample_packing"):
        assumed.append("every example is as long as sequence_len: an upper bound")
    return {
        "program": "axolotl",
        **sharded,
        **found,
        "precision": precision or "float32",
        "weights": "16 bits" if precision else "float32",
        "recompute": recompute,
        "loss": "in pieces" if pieces else "all logits",
        "attention": attention,
        "assumed": tuple(assumed),
    }


def _is_on_at(values: Values, key: str) -> bool:
    return key in values and values[key] is not None and is_on(values, key)


_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing", "fsdp_config.activation_checkpointing",
                  "fsdp_config.fsdp_activation_checkpointing")  # fmt: skip


def _is_checkpointed(values: Values) -> bool:
    return any(str(values.get(key)).lower() in ("true", "unsloth", "offload", "offload_disk") for key in _CHECKPOINTING)


AXOLOTL = ConfigFormat(
    name="Axolotl YAML",
    known="axolotl",
    marks=("base_model",),
    describe=_describe,
    not_priced={
        "rl": "preference or reinforcement learning, with more than one pass",
        "layer_offloading": "layers offloaded to the host's memory",
        "activation_offloading": "activations offloaded to the host's memory",
        "qat": "quantization-aware training",
        "gptq": "GPTQ weights",
        "relora": "adapters merged during training",
        "lisa_n_layers": "layers trained in turn",
        "unfrozen_parameters": "weights trained in part",
        "spectrum_top_fraction": "weights trained in part",
        "lora_modules_to_save": "whole layers trained in addition to the adapters",
        "quantize_moe_experts": "quantized experts",
        "tiled_mlp": "a tiled feed-forward",
        "kd_trainer": "a teacher's logits",
        "expert_parallel_size": "experts on other devices",
        "peft_use_dora": "DoRA's norms",
        "reward_model": "a reward model",
        "process_reward_model": "a reward model",
        "diffusion": "a diffusion model",
    },
    changes={
        "smaller micro-batch": "micro_batch_size: {micro}, gradient_accumulation_steps: {accumulation}",
        "larger micro-batch": "micro_batch_size: {micro}, gradient_accumulation_steps: {accumulation}",
        "recompute": "gradient_checkpointing: true",
        "no recompute": "gradient_checkpointing: false",
        "loss in pieces": "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]",
        "8-bit optimizer": "optimizer: adamw_bnb_8bit",
        "shard optimizer": "deepspeed: deepspeed_configs/zero1.json",
        "shard gradients": "deepspeed: deepspeed_configs/zero2.json",
        "shard parameters": "fsdp_version: 2 with fsdp_config",
        "shard less": "deepspeed: deepspeed_configs/zero1.json in place of fsdp_config",
        "quantize": "load_in_4bit: true, adapter: qlora",
        "adapters": "adapter: lora, lora_r: 16, lora_target_linear: true",
        "shorter sequence": "sequence_len: {sequence}",
    },
)
