"""TrainingArguments of transformers and the configurations of TRL: JSON, Python's source, or a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from plait.errors import PlaitError
from plait.foreign_configs.adapters import PEFT_DEFAULT, adapter_targets
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

TRL_SEQUENCE = 1024
"""Default of SFTConfig's max_length."""
_FIELDS: KeyFields = {
    "model_name_or_path": ("model", as_written),
    "max_length": ("sequence", whole_or_none),
    "max_seq_length": ("sequence", whole_or_none),
    "max_seq_len": ("sequence", whole_or_none),
    "block_size": ("sequence", whole_or_none),
    "per_device_train_batch_size": ("micro_sequences", whole),
    "per_gpu_train_batch_size": ("micro_sequences", whole_or_none),
    "gradient_accumulation_steps": ("accumulation", whole),
    "num_train_epochs": ("epochs", amount),
    "max_steps": ("steps", whole_or_none),
    "max_train_samples": ("samples", whole_or_none),
    "optim": ("optimizer", word),
    "torch_compile": ("compiled", true_or_false),
    "lora_r": ("adapter_rank", whole_or_none),
    "lora_target_modules": ("lora_target_modules", words),
}
_LOADED_IN = ("dtype", "torch_dtype", "bnb_4bit_quant_storage_dtype")
_BITS = {"load_in_4bit": 4, "load_in_8bit": 8, "use_4bit_quantization": 4, "use_8bit_quantization": 8}
_CHECKPOINTING = ("gradient_checkpointing", "fsdp_config.activation_checkpointing",
                  "fsdp_config.fsdp_activation_checkpointing")  # fmt: skip
_MIXED = ("bf16", "fp16", "fp8")
"""Values of `accelerate launch --mixed_precision`, used if the program's own arguments name no precision."""
USUAL_BATCH = 8
"""Default of per_device_train_batch_size."""
_OFFLOADS = re.compile(r"\boffload\b")


def _describe(values: Values, overridden: Values) -> dict[str, Any]:
    found = fields_of_keys(values, _FIELDS, overridden)
    assumed: list[str] = []
    if "micro_sequences" not in found and "micro_sequences" not in overridden:
        found["micro_sequences"] = USUAL_BATCH
        assumed.append(f"per_device_train_batch_size is {USUAL_BATCH}, transformers' default")
    if "sequence" not in found and "sequence" not in overridden:
        found["sequence"] = TRL_SEQUENCE
        assumed.append(f"sequences of {TRL_SEQUENCE} tokens, TRL's default; give sequence=NUMBER for another length")
    if "epochs" not in found and "steps" not in found:
        found["epochs"] = 3.0
    found |= _adapters(values, found)
    found |= _sharding(values, overridden, assumed)
    mixed = str(values.get("mixed_precision")).lower()
    precision = one_of(values, {"bf16": "bf16", "fp16": "fp16"}) or (mixed if mixed in _MIXED else None)
    loaded = next((word(key, values[key]) for key in _LOADED_IN if values.get(key) is not None), "")
    if loaded in ("bfloat16", "float16", "bf16", "fp16", "half"):
        weights = "16 bits"
        precision = precision or ("bf16" if loaded.startswith("b") else "fp16")
    else:
        weights = "float32"
        if not loaded or loaded == "auto":
            assumed.append("weights are loaded in float32; give weights=bf16 if the program loads them in 16 bits")
    pieces = is_on(values, "use_liger_kernel") or is_on(values, "use_liger_loss")
    attention = word("attn_implementation", values.get("attn_implementation") or "sdpa")
    if not is_on(values, "packing"):
        assumed.append("every example fills its sequence: an upper bound")
    return {
        "program": "transformers",
        **found,
        "precision": precision or ("tf32" if is_on(values, "tf32") else "float32"),
        "weights": weights,
        "recompute": "full" if any(is_on(values, key) for key in _CHECKPOINTING) else "none",
        "loss": "in pieces" if pieces else "all logits",
        "attention": "unfused" if attention == "eager" else "flash",
        "assumed": tuple(assumed),
    }


def _adapters(values: Values, found: dict[str, Any]) -> dict[str, Any]:
    names = found.pop("lora_target_modules", ())
    bits = one_of(values, _BITS) or 0
    if not is_on(values, "use_peft") and not is_on(values, "use_peft_lora"):
        if bits:
            raise PlaitError(f"load_in_{bits}bit quantizes all weights, so none would be trained; add use_peft")
        found.pop("adapter_rank", None)
        return {}
    rank = found.get("adapter_rank", 16)
    targets = adapter_targets(names) if names else PEFT_DEFAULT
    return {"adapter_rank": rank, "adapter_targets": targets, "quantized_bits": bits}


def _sharding(values: Values, overridden: Values, assumed: list[str]) -> dict[str, Any]:
    by_launcher = _accelerate_sharding(values, overridden, assumed)
    if by_launcher:
        return by_launcher
    fsdp = values.get("fsdp")
    text = " ".join(map(str, fsdp)) if isinstance(fsdp, list | tuple) else str(fsdp or "")
    has_deepspeed = bool(values.get("deepspeed")) or any(key.startswith("deepspeed.") for key in values)
    is_sharded = text.strip() not in ("", "False", "false")
    if is_sharded and has_deepspeed:
        raise PlaitError("fsdp and deepspeed contradict each other; keep one")
    inside = {key.removeprefix("deepspeed."): value for key, value in values.items() if key.startswith("deepspeed.")}
    if inside:
        return zero_fields(inside)
    if has_deepspeed:
        return zero_fields_of_file("deepspeed", values["deepspeed"], overridden, assumed)
    if not is_sharded:
        return {}
    offloads = bool(_OFFLOADS.search(text)) or is_on(values, "fsdp_config.offload_params")
    what = "gradients" if "shard_grad_op" in text else "nothing" if "no_shard" in text else "parameters"
    return {"sharded": what, "offloads_parameters": offloads, "offloads_optimizer": offloads}


def launcher_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `accelerate launch` (with - instead of _) under the keys of its file; empty for other launchers,
    whose options have other names."""
    found = {key: options[name] for name, key in _LAUNCHER_OPTIONS.items() if name in options}
    if "use-deepspeed" in options:
        found["distributed_type"] = "deepspeed"
    elif "use-fsdp" in options:
        found["distributed_type"] = "fsdp"
    return found


_LAUNCHER_OPTIONS = {
    "mixed-precision": "mixed_precision",
    "zero-stage": "deepspeed_config.zero_stage",
    "deepspeed-config-file": "deepspeed_config.deepspeed_config_file",
    "offload-optimizer-device": "deepspeed_config.offload_optimizer_device",
    "offload-param-device": "deepspeed_config.offload_param_device",
    "fsdp-sharding-strategy": "fsdp_config.fsdp_sharding_strategy",
    "fsdp-offload-params": "fsdp_config.fsdp_offload_params",
}


def _accelerate_sharding(values: Values, overridden: Values, assumed: list[str]) -> dict[str, Any]:
    """The sharding in the file and options of `accelerate launch`; empty if they leave it to the program."""
    kind = word("distributed_type", values.get("distributed_type") or "no")
    if kind == "fsdp":
        said = str(values.get("fsdp_config.fsdp_sharding_strategy", "FULL_SHARD")).lower()
        what = {"shard_grad_op": "gradients", "2": "gradients", "no_shard": "nothing", "3": "nothing"}.get(
            said, "parameters"
        )
        offloads = is_on(values, "fsdp_config.fsdp_offload_params")
        return {"sharded": what, "offloads_parameters": offloads, "offloads_optimizer": offloads}
    if kind == "deepspeed":
        file = values.get("deepspeed_config.deepspeed_config_file")
        if file:
            return zero_fields_of_file("deepspeed_config_file", file, overridden, assumed)
        inside = {
            "zero_optimization.stage": values.get("deepspeed_config.zero_stage", 2),
            "zero_optimization.offload_optimizer.device": values.get("deepspeed_config.offload_optimizer_device"),
            "zero_optimization.offload_param.device": values.get("deepspeed_config.offload_param_device"),
        }
        return zero_fields({key: value for key, value in inside.items() if value is not None})
    return {}


TRAINING_ARGUMENTS = ConfigFormat(
    name="TrainingArguments of transformers or TRL (JSON, Python, command line)",
    known="transformers",
    marks=("per_device_train_batch_size", "num_train_epochs", "output_dir", "gradient_accumulation_steps", "max_steps"),
    describe=_describe,
    not_priced={
        "neftune_noise_alpha": "noise on the embeddings",
        "auto_find_batch_size": "a batch halved until it fits",
        "optim_target_modules": "low-rank optimizer state",
        "torch_empty_cache_steps": "the allocator's cache emptied now and then",
        "use_dora": "DoRA's norms",
        "parallelism_config": "tensor or context parallelism by Accelerate",
        "sync_ref_model": "a reference model",
        "ref_model_mixup_alpha": "a reference model",
        "beta": "a reference model, or an update's decay",
        "num_generations": "generated texts",
        "use_vllm": "vLLM during training",
        "adafactor": "Adafactor's state",
    },
    changes={
        "smaller micro-batch": "--per_device_train_batch_size {micro} --gradient_accumulation_steps {accumulation}",
        "larger micro-batch": "--per_device_train_batch_size {micro} --gradient_accumulation_steps {accumulation}",
        "recompute": "--gradient_checkpointing true",
        "no recompute": "--gradient_checkpointing false",
        "loss in pieces": "--use_liger_kernel true",
        "8-bit optimizer": "--optim adamw_bnb_8bit",
        "shard optimizer": "--deepspeed with a file of ZeRO stage 1",
        "shard gradients": "--deepspeed with a file of ZeRO stage 2",
        "shard parameters": '--fsdp "full_shard auto_wrap"',
        "shard less": '--fsdp "shard_grad_op auto_wrap"',
        "16-bit weights": "--dtype bfloat16",
        "quantize": "--load_in_4bit",
        "adapters": "--use_peft --lora_r 16 --lora_target_modules all-linear",
        "shorter sequence": "--max_length {sequence}",
    },
)
