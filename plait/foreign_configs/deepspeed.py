"""DeepSpeed's JSON: batch, precision, ZeRO stage and offloading; the program itself defines the model."""

from __future__ import annotations

import re
from typing import Any

from plait.errors import PlaitError
from plait.foreign_configs.keys import ConfigFormat, KeyFields, Values, fields_of_keys, is_on, one_of, whole, word
from plait.planner.problem.candidates import SHARDED_STATES

_FIELDS: KeyFields = {
    "train_micro_batch_size_per_gpu": ("micro_sequences", whole),
    "gradient_accumulation_steps": ("accumulation", whole),
    "train_batch_size": ("batch_sequences", whole),
    "tensor_parallel.autotp_size": ("tensor", whole),
    "zero_optimization.zero_hpz_partition_size": ("hpz", whole),
    "zero_optimization.mics_shard_size": ("shard", whole),
}
_STAGE = re.compile(r"(?:zero|stage|(?<![a-z])z)[_-]?([0-3])")


def zero_fields(values: Values) -> dict[str, Any]:
    """Fields for the ZeRO stage and its offloading, for every program that uses DeepSpeed's file."""
    stage = str(values.get("zero_optimization.stage", 0))
    if stage not in ("0", "1", "2", "3"):
        raise PlaitError(f"zero_optimization.stage = {stage:.40} is not 0, 1, 2 or 3")
    moved = {
        what: word(key, values.get(f"zero_optimization.{key}.device", "none")) not in ("none", "")
        for what, key in (("offloads_optimizer", "offload_optimizer"), ("offloads_parameters", "offload_param"))
    }
    if is_on(values, "zero_optimization.cpu_offload"):
        moved["offloads_optimizer"] = True
    return {"sharded": SHARDED_STATES[int(stage)], **moved}


def zero_fields_of_file(key: str, file: object, overridden: Values, assumed: list[str]) -> dict[str, Any]:
    """The same fields from the name of a DeepSpeed file, which is not read; adds to `assumed` what was taken from the
    name. Raises PlaitError if neither the name nor the user says the stage."""
    name = str(file).lower()
    stages = _STAGE.findall(name)
    if not stages and "sharded" not in overridden:
        raise PlaitError(
            f"{key}: {file} does not say the ZeRO stage by its name; "
            "give sharded=optimizer (stage 1), sharded=gradients (2) or sharded=parameters (3)"
        )
    stage = int(stages[-1]) if stages else SHARDED_STATES.index("parameters")
    offloads = "offload" in name
    of_parameters = offloads and stage == SHARDED_STATES.index("parameters") and "optimizer" not in name
    found: dict[str, Any] = {
        "offloads_optimizer": offloads and "param" not in name,
        "offloads_parameters": of_parameters,
    }
    if "sharded" not in overridden:
        assumed.append(f"ZeRO stage {stage}, from the name of {file}, which was not read")
        found["sharded"] = SHARDED_STATES[stage]
    return found


def _describe(values: Values, overridden: Values) -> dict[str, Any]:
    found = fields_of_keys(values, _FIELDS, overridden)
    if found.pop("hpz", 1) != 1:
        found["not_priced"] = (
            "zero_optimization.zero_hpz_partition_size (a second copy of the parameters in each node)",
        )
    precision = one_of(values, {"bf16.enabled": "bf16", "bfloat16.enabled": "bf16", "fp16.enabled": "fp16"})
    autos = [key for key in ("bf16.enabled", "fp16.enabled") if values.get(key) == "auto"]
    optimizer = values.get("optimizer.type")
    return {
        **found,
        **zero_fields(values),
        "program": "deepspeed",
        "precision": precision or "float32",
        "weights": "16 bits" if precision else "float32",
        "has_master_weights": precision is not None,
        **({"optimizer": word("optimizer.type", optimizer)} if optimizer else {}),
        "recompute": "none",
        "assumed": (
            *((f"{' and '.join(autos)} are auto, which means {precision}",) if len(autos) > 1 else ()),
            *(() if optimizer else ("the optimizer is AdamW",)),
            "nothing is recomputed; give recompute=full if the program does",
        ),
    }


_BATCH = '"train_micro_batch_size_per_gpu": {micro}, "gradient_accumulation_steps": {accumulation}'
DEEPSPEED = ConfigFormat(
    name="DeepSpeed JSON",
    known="deepspeed",
    marks=("zero_optimization.stage", "train_micro_batch_size_per_gpu", "train_batch_size"),
    describe=_describe,
    not_priced={
        "zero_optimization.zero_quantized_weights": "parameters sent in fewer bits",
        "zero_optimization.zero_quantized_gradients": "gradients sent in fewer bits",
        "compression_training": "compressed weights",
        "sparse_attention": "sparse attention",
        "curriculum_learning": "sequences of growing length",
        "progressive_layer_drop": "skipped layers",
        "sequence_parallel_size": "sequences split over devices",
        "amp": "NVIDIA's AMP instead of 16-bit weights",
    },
    changes={
        "smaller micro-batch": _BATCH,
        "larger micro-batch": _BATCH,
        "recompute": "gradient checkpointing in the program (model.gradient_checkpointing_enable())",
        "no recompute": "no gradient checkpointing in the program",
        "shard optimizer": '"zero_optimization": {{"stage": 1}}',
        "shard gradients": '"zero_optimization": {{"stage": 2}}',
        "shard parameters": '"zero_optimization": {{"stage": 3}}',
        "shard less": '"zero_optimization": {{"stage": 1}}',
        "offload optimizer": '"zero_optimization": {{"offload_optimizer": {{"device": "cpu"}}}}',
        "shorter sequence": "sequences of {sequence} tokens in the program",
    },
)
