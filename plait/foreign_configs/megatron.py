"""Megatron-LM's command line, and Megatron-DeepSpeed's."""

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
    whole,
    whole_or_none,
    word,
)
from plait.planner.problem.candidates import SHARDED_STATES

_FIELDS: KeyFields = {
    "seq-length": ("sequence", whole),
    "encoder-seq-length": ("sequence", whole),
    "micro-batch-size": ("micro_sequences", whole),
    "batch-size": ("micro_sequences", whole),
    "global-batch-size": ("batch_sequences", whole),
    "train-iters": ("steps", whole),
    "train-samples": ("samples", whole),
    "tensor-model-parallel-size": ("tensor", whole),
    "model-parallel-size": ("tensor", whole),
    "pipeline-model-parallel-size": ("pipeline", whole),
    "context-parallel-size": ("context", whole),
    "expert-model-parallel-size": ("expert", whole),
    "optimizer": ("optimizer", word),
}
_MODEL_FIELDS: KeyFields = {
    "num-layers": ("layers", whole),
    "encoder-num-layers": ("layers", whole),
    "hidden-size": ("width", whole),
    "num-attention-heads": ("heads", whole),
    "num-query-groups": ("kv_heads", whole),
    "kv-channels": ("head_width", whole),
    "ffn-hidden-size": ("ffn", whole),
    "vocab-size": ("vocabulary", whole),
    "num-experts": ("experts", whole_or_none),
    "moe-router-topk": ("experts_per_token", whole),
    "moe-ffn-hidden-size": ("expert_ffn", whole),
    "moe-shared-expert-intermediate-size": ("shared_ffn", whole_or_none),
}
_GPT2_VOCABULARY = 50_257
_OF_2021 = ("checkpoint-activations", "activations-checkpoint-method", "activations-checkpoint-num-layers", "DDP-impl",
            "checkpoint-num-layers", "model-parallel-size", "distribute-checkpointed-activations")  # fmt: skip
"""Options that were removed in 2022: they date the program."""


def _describe(values: Values, overridden: Values) -> dict[str, Any]:
    found = fields_of_keys(values, _FIELDS, overridden)
    shape = fields_of_keys(values, _MODEL_FIELDS, overridden)
    assumed: list[str] = []
    if "model" not in overridden:
        needed = {"num-layers": "layers", "hidden-size": "width", "num-attention-heads": "heads"}
        missing = [key for key, name in needed.items() if name not in shape]
        if missing:
            raise PlaitError(
                f"the command has no {', '.join(f'--{key}' for key in missing)}; add them, or give model=NAME"
            )
        found["shape"] = _shape(values, shape, found.get("tensor", 1), assumed)
    era = any(_is_there(values, key) for key in _OF_2021)
    zero = whole_or_none("zero-stage", values["zero-stage"]) if values.get("zero-stage") is not None else None
    sharded = SHARDED_STATES[zero or 0] if zero else "nothing"
    if is_on(values, "use-distributed-optimizer"):
        sharded = "optimizer"
    if any(is_on(values, key) for key in ("use-torch-fsdp2", "use-custom-fsdp", "use-megatron-fsdp")):
        sharded = "parameters"
    precision = one_of(values, {"bf16": "bf16", "fp16": "fp16"}) or "float32"
    if values.get("fp8-format") or values.get("fp8-hybrid") or values.get("fp8-e4m3") or values.get("fp8"):
        precision = "fp8"
    flash = not era and not is_on(values, "no-flash-attn")
    if era and is_on(values, "use-flash-attn"):
        flash = True
    virtual = 1
    if "pipeline" in found and (each := values.get("num-layers-per-virtual-pipeline-stage")) is not None:
        per = whole("num-layers-per-virtual-pipeline-stage", each) or 1
        virtual = max(shape.get("layers", per) // found["pipeline"] // per, 1)
    elif (count := values.get("num-virtual-stages-per-pipeline-rank")) is not None:
        virtual = whole("num-virtual-stages-per-pipeline-rank", count) or 1
    if "micro_sequences" not in found and "micro_sequences" not in overridden:
        raise PlaitError("the command has no --micro-batch-size; add it, or give micro_sequences=NUMBER")
    if "rampup-batch-size" in values:
        assumed.append("the batch has its full size, as after --rampup-batch-size")
    return {
        "program": "megatron 2021" if era else "megatron",
        **found,
        "virtual": virtual,
        "sharded": sharded,
        "sequence_parallel": is_on(values, "sequence-parallel"),
        "precision": precision,
        "weights": "float32" if precision == "float32" else "16 bits",
        "has_master_weights": True,
        "recompute": _recompute(values),
        "attention": "flash" if flash else "unfused",
        "offloads_optimizer": is_on(values, "optimizer-cpu-offload") or is_on(values, "cpu-optimizer"),
        "assumed": tuple(assumed),
    }


def _shape(values: Values, shape: dict[str, Any], tensor: int, assumed: list[str]) -> dict[str, Any]:
    gated = is_on(values, "swiglu") or bool(values.get("glu-activation"))
    width = shape["width"]
    shape.setdefault("ffn", int(4 * width * 2 / 3) // 64 * 64 if gated else 4 * width)
    if not is_on(values, "group-query-attention"):
        shape["kv_heads"] = shape["heads"]
    if "vocabulary" not in shape:
        shape["vocabulary"] = _GPT2_VOCABULARY
        assumed.append("a vocabulary of GPT-2's 50,257 tokens; give vocabulary=NUMBER for another one")
    key = "make-vocab-size-divisible-by"
    multiple = (whole(key, values.get(key, 128)) or 128) * tensor
    shape["vocabulary"] = -(-shape["vocabulary"] // multiple) * multiple
    if shape.get("experts"):
        shape.setdefault("experts_per_token", 2)
        shape.setdefault("expert_ffn", shape["ffn"])
    return {**shape, "gated": gated, "tied": not is_on(values, "untie-embeddings-and-output-weights")}


def _recompute(values: Values) -> str:
    granularity = values.get("recompute-granularity")
    if granularity:
        text = word("recompute-granularity", granularity)
        if text not in ("full", "selective"):
            raise PlaitError(f"--recompute-granularity {text} is not full or selective; write one of them")
        return text
    if is_on(values, "recompute-activations"):
        return "selective"
    old = ("checkpoint-activations", "activations-checkpoint-method", "deepspeed-activation-checkpointing")
    return "full" if any(_is_there(values, key) for key in old) else "none"


def _is_there(values: Values, key: str) -> bool:
    return values.get(key) not in (None, False, "none")


MEGATRON_ARGUMENTS = ConfigFormat(
    name="Megatron command line (a shell script or the line)",
    known="megatron",
    marks=("num-layers", "hidden-size", "micro-batch-size", "tensor-model-parallel-size"),
    describe=_describe,
    not_priced={
        "multi-latent-attention": "latent attention",
        "cpu-offloading": "activations offloaded to the host's memory",
        "fine-grained-activation-offloading": "activations offloaded to the host's memory",
        "mtp-num-layers": "multi-token prediction",
        "recompute-num-layers": "recompute of some layers, priced as of all",
        "decoder-first-pipeline-num-layers": "a different number of layers in the first stage",
        "decoder-last-pipeline-num-layers": "a different number of layers in the last stage",
        "pipeline-model-parallel-layout": "stages of unequal size",
        "moe-layer-freq": "some layers without experts",
        "use-precision-aware-optimizer": "optimizer state in fewer bits",
        "hybrid-override-pattern": "state-space layers",
        "is-hybrid-model": "state-space layers",
        "moe-expert-capacity-factor": "dropped tokens",
        "window-size": "sliding windows",
    },
    changes={
        "smaller micro-batch": "--micro-batch-size {micro}",
        "larger micro-batch": "--micro-batch-size {micro}",
        "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "selective recompute": "--recompute-activations",
        "no recompute": "no recompute (remove --recompute-…)",
        "shard optimizer": "--use-distributed-optimizer",
        "sequence parallel": "--sequence-parallel",
        "shorter sequence": "--seq-length {sequence}",
    },
)
