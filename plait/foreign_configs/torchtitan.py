"""torchtitan's TOML, and its command line's `--section.key value`."""

from __future__ import annotations

from typing import Any

from plait.errors import PlaitError
from plait.foreign_configs.keys import (
    ConfigFormat,
    KeyFields,
    Values,
    fields_of_keys,
    is_on,
    one_of,
    true_or_false,
    whole,
    word,
)

_SECTIONS = ("parallelism", "experimental", "training")
"""Sections in which the degrees were at some release."""
_FIELDS: KeyFields = {
    "training.seq_len": ("sequence", whole),
    "training.local_batch_size": ("local", whole),
    "training.batch_size": ("local", whole),
    "training.global_batch_size": ("batch_sequences", whole),
    "training.steps": ("steps", whole),
    "optimizer.name": ("optimizer", word),
    "training.compile": ("compiled", true_or_false),
    "compile.enable": ("compiled", true_or_false),
    **{f"{one}.tensor_parallel_degree": ("tensor", whole) for one in _SECTIONS},
    **{f"{one}.pipeline_parallel_degree": ("pipeline", whole) for one in _SECTIONS},
    **{f"{one}.context_parallel_degree": ("context", whole) for one in _SECTIONS},
    **{f"{one}.data_parallel_shard_degree": ("shard", whole) for one in _SECTIONS},
    **{f"{one}.data_parallel_replicate_degree": ("replicate", whole) for one in _SECTIONS},
    "parallelism.expert_parallel_degree": ("expert", whole),
    "parallelism.pipeline_parallel_microbatch_size": ("piped", whole),
}
_OF_2024 = ("training.batch_size", "training.tensor_parallel_degree", "training.data_parallel_degree")
"""Keys that were removed in 2025: they date the program."""
_DEFAULT_LOCAL, _DEFAULT_SEQUENCE = 8, 2048


def _describe(values: Values, overridden: Values) -> dict[str, Any]:
    found = fields_of_keys(values, _FIELDS, overridden)
    assumed: list[str] = []
    replicate = found.pop("replicate", 1)
    local, piped = found.pop("local", None), found.pop("piped", 1)
    pipeline = found.get("pipeline", 1)
    if local is None:
        local = _DEFAULT_LOCAL
        assumed.append(f"training.local_batch_size is {local}, torchtitan's default")
    if "sequence" not in found and "sequence" not in overridden:
        found["sequence"] = _DEFAULT_SEQUENCE
        assumed.append(f"training.seq_len is {_DEFAULT_SEQUENCE}, torchtitan's default")
    if pipeline > 1:  # the batch of each pipeline is split into micro-batches of this size
        found |= {"micro_sequences": piped, "accumulation": max(local // piped, 1)}
    else:
        found["micro_sequences"] = local
    shards = found.get("shard") != 1 or (found.get("context", 1) > 1 and replicate == 1)
    found["sharded"] = "parameters" if shards else "nothing"
    mode = word("activation_checkpoint.mode", values.get("activation_checkpoint.mode") or "selective")
    if mode not in ("none", "selective", "full", "memory_budget"):
        raise PlaitError(f"activation_checkpoint.mode = {mode!r:.40} is not none, selective or full")
    schedule = word("schedule", _first(values, "pipeline_parallel_schedule") or "1f1b")
    if "interleaved" in schedule and pipeline > 1:
        found["virtual"] = 2
        assumed.append("two stages per pipeline rank")
    model, flavor = values.get("model.name"), values.get("model.flavor")
    if model and "model" not in overridden:
        found["model"] = f"{model}-{flavor}" if flavor else str(model)
    converters = " ".join(map(str, _listed(values.get("model.converters"))))
    fp8 = "float8" in converters or one_of(
        values,
        {"float8.enable_float8_linear": True, "training.enable_float8_linear": True, "training.fp8_linear": True},
    )
    rowwise = str(values.get("quantize.linear.float8.recipe_name") or values.get("float8.recipe_name") or "")
    precision = str(values.get("training.mixed_precision_param") or "bfloat16")
    offloads = is_on(values, "training.enable_cpu_offload")
    return {
        "program": "torchtitan 2024" if any(key in values for key in _OF_2024) else "torchtitan",
        **found,
        "sequence_parallel": found.get("tensor", 1) > 1,
        # fp8 scaled by row gained nothing over bf16 in torchtitan's own tables of 2025.
        "precision": "fp8" if fp8 and "rowwise" not in rowwise else "float32" if precision == "float32" else "bf16",
        "weights": "float32",
        "recompute": "selective" if mode == "memory_budget" else mode,
        "offloads_optimizer": offloads,
        "offloads_parameters": offloads,
        "assumed": tuple(assumed),
    }


def _first(values: Values, name: str) -> Any:
    return next((values[f"{one}.{name}"] for one in _SECTIONS if values.get(f"{one}.{name}")), None)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] if value else []


_PIPED = "parallelism.pipeline_parallel_microbatch_size = {micro}"
TORCHTITAN_TOML = ConfigFormat(
    name="torchtitan TOML",
    known="torchtitan",
    marks=("training.seq_len", "model.flavor", "training.local_batch_size", "activation_checkpoint.mode",
           "parallelism.tensor_parallel_degree"),
    describe=_describe,
    not_priced={
        "activation_checkpoint.memory_budget": "recompute with a memory budget",
        "model.use_flex_attn": "FlexAttention",
        "optimizer.early_step_in_backward": "updates during the backward pass",
        "mx.recipe_name": "MXFP8",
        "quantize.linear.mx.recipe_name": "MXFP8",
        "fault_tolerance.enable": "torchft",
        "parallelism.fsdp_reshard_after_forward": "parameters kept gathered",
    },
    changes={
        "smaller micro-batch": "training.local_batch_size = {micro}, training.global_batch_size = {batch}",
        "larger micro-batch": "training.local_batch_size = {micro}, training.global_batch_size = {batch}",
        "smaller micro-batch of a pipeline": _PIPED,
        "larger micro-batch of a pipeline": _PIPED,
        "recompute": 'activation_checkpoint.mode = "full"',
        "selective recompute": 'activation_checkpoint.mode = "selective"',
        "no recompute": 'activation_checkpoint.mode = "none"',
        "shard parameters": "parallelism.data_parallel_shard_degree = -1",
        "compile": "compile.enable = true",
        "shorter sequence": "training.seq_len = {sequence}",
    },
)  # fmt: skip
