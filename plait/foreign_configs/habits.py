"""How each program uses its devices: its profile, the precision of weights, gradients and optimizer state that a
configuration sets, and memory that only this program holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.foreign_configs.run_description import ForeignProgram, RunDescription
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.program_profiles import (
    DEEPSPEED_ENGINE,
    HUGGING_FACE,
    LITGPT_PROFILE,
    MEGATRON,
    MEGATRON_2021,
    TORCHTITAN_2024,
    TORCHTITAN_2025,
    TORCHTITAN_EAGER,
)
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import layer_parameters
from plait.planner.problem.workload import Workload
from plait.planner.step_time.roofline import local_tokens

PROFILES: Mapping[ForeignProgram, SoftwareProfile] = {
    "axolotl": HUGGING_FACE,
    "transformers": HUGGING_FACE,
    "torchtitan": TORCHTITAN_2025,
    "torchtitan 2024": TORCHTITAN_2024,
    "megatron": MEGATRON,
    "megatron 2021": MEGATRON_2021,
    "deepspeed": DEEPSPEED_ENGINE,
    "litgpt": LITGPT_PROFILE,
}
_MOMENTS: Mapping[str, tuple[float, float]] = {
    "adam": (4.0, 4.0), "adamw": (4.0, 4.0), "adamw_torch": (4.0, 4.0), "adamw_torch_fused": (4.0, 4.0),
    "adamw_hf": (4.0, 4.0), "adamw_apex_fused": (4.0, 4.0), "adamw_anyprecision": (4.0, 4.0),
    "fusedadam": (4.0, 4.0), "cpuadam": (4.0, 4.0), "deepspeedcpuadam": (4.0, 4.0), "paged_adamw": (4.0, 4.0),
    "paged_adamw_32bit": (4.0, 4.0), "onebitadam": (4.0, 4.0), "lamb": (4.0, 4.0),
    "adamw_8bit": (1.0, 1.0), "adamw_bnb_8bit": (1.0, 1.0), "paged_adamw_8bit": (1.0, 1.0),
    "adamw_torch_8bit": (1.0, 1.0), "ao_adamw_8bit": (1.0, 1.0), "adamw_torch_4bit": (0.5, 0.5),
    "adafactor": (0.0, 0.0), "sgd": (0.0, 0.0), "muon": (4.0, 0.0),
    "lion": (4.0, 0.0), "lion_32bit": (4.0, 0.0), "lion_8bit": (1.0, 0.0), "paged_lion_8bit": (1.0, 0.0),
    "paged_lion_32bit": (4.0, 0.0), "rmsprop": (4.0, 0.0), "adagrad": (4.0, 0.0),
}  # fmt: skip
"""Bytes of an optimizer's two moments per weight in float32. With 16-bit weights, four-byte moments shrink to two
bytes, unless float32 master weights are kept."""
_OWN_NUMBERS: tuple[ForeignProgram, ...] = ("torchtitan", "torchtitan 2024", "megatron", "megatron 2021")
"""Programs whose profile fixes the precision of each number; the configuration does not change it."""
ADAPTER_STATE_BYTES = 12
"""Bytes of an adapter's weight beyond its 16-bit copy, and of its moments; PEFT keeps all of them in float32."""


def knows_optimizer(name: str) -> bool:
    """Whether plait knows the state of an optimizer of this name."""
    return name.replace("-", "_") in _MOMENTS


KEEPS_16_BITS: tuple[ForeignProgram, ...] = ("torchtitan", "torchtitan 2024")
"""Programs whose 8-bit products keep their inputs in 16 bits for the backward pass (torchtitan's tables: 77.0 and 76.8
GiB)."""
LOGIT_BYTES_IN_PIECES, LOGITS_IN_PIECES = 1.0, 2.0**27
"""A fused loss keeps only a part of the logits at a time."""
QUANTIZED_KEPT = 15.0
"""Bytes that litgpt keeps per token, layer and unit of width if the layers' matrices are quantized: copies of their
inputs in the compute dtype. From its tables for four models (13 to 18), October 2023."""
NORM_COPIES = 7.0
"""The same for an RMSNorm computed in float32 by separate operations; from its tables for Llama 2."""


def profile_of(run: RunDescription, workload: Workload, candidates: Candidates) -> SoftwareProfile:
    """The profile with which a run is priced."""
    profile = PROFILES[run.program]
    if run.program in ("torchtitan", "torchtitan 2024") and not run.compiled:
        profile = TORCHTITAN_EAGER
    if run.loss == "in pieces":
        profile = replace(profile, logit_copies_bytes=LOGIT_BYTES_IN_PIECES, logits_at_once=LOGITS_IN_PIECES)
    if run.adapter_rank and run.program == "litgpt":
        # A frozen matrix does not need its input: without a gate, the activation's result is not kept.
        held = profile.stream_held_bytes + (NORM_COPIES if workload.gated else -2.0 * workload.ffn / workload.width)
        profile = replace(profile, stream_held_bytes=held)
    return _with_numbers(profile, run, bool(candidates.is_fully_sharded[0]))


def held_besides(run: RunDescription, workload: Workload, candidates: Candidates) -> dict[str, float]:
    """Bytes by item that a program holds but its profile does not count."""
    found = {"parameters": 0.0, "gradients": 0.0, "gathered": 0.0, "activations": 0.0}
    common, experts = layer_parameters(workload, candidates)
    stage = workload.layers * float(common[0] + experts[0]) / float(candidates.pipeline[0])
    shard = float(candidates.shard[0])
    tokens = float(local_tokens(workload, candidates)[0])
    if run.program == "litgpt" and run.quantized_bits and run.recompute == "none":
        found["activations"] += QUANTIZED_KEPT * workload.width * workload.layers * tokens
    if run.program == "litgpt" and shard > 1 and not run.adapter_rank and _accumulates(workload, candidates):
        # Gradients are summed over ranks once per step, and are whole on each rank until then (FSDP's no_sync).
        found["gradients"] += 2.0 * workload.parameters * (1 - 1 / shard)
    if run.program in ("torchtitan", "torchtitan 2024") and run.layout.pipeline > 1 and shard > 1:
        # In a pipeline, weights stay gathered (16 bits) and gradients whole (32 bits) until all micro-batches are done.
        found["gathered"] += 6.0 * stage * (1 - 1 / shard)
    return found


def loading_bytes(run: RunDescription, workload: Workload, candidates: Candidates) -> float:
    """Bytes on a device while a program loads a model before sharding it; 0 if it loads the model in parts."""
    shard = float(candidates.shard[0])
    if run.program != "litgpt" or shard == 1:
        return 0.0
    return workload.parameters * float(4 if run.weights == "float32" else 2) * (1 + 1 / shard)


def _accumulates(workload: Workload, candidates: Candidates) -> bool:
    each = float(candidates.data_parallel_degree[0]) * float(candidates.micro_sequences[0])
    return workload.batch_sequences > each


def _with_numbers(profile: SoftwareProfile, run: RunDescription, is_fully_sharded: bool) -> SoftwareProfile:
    """The profile with this run's precision of weights, gradients and optimizer state."""
    moments = _MOMENTS.get(run.optimizer.replace("-", "_"), _MOMENTS["adamw"])
    if run.program in _OWN_NUMBERS:
        state = profile.state_bytes - 8 + int(sum(moments))
        return replace(profile, state_bytes=state)
    if run.adapter_rank:
        number = 4 if run.weights == "float32" else 2
        state = ADAPTER_STATE_BYTES - 8 + int(sum(moments))
        return replace(profile, weight_bytes=number, gradient_bytes=4, state_bytes=max(state, number))
    if run.weights == "float32":
        return replace(profile, weight_bytes=4, gradient_bytes=4, state_bytes=4 + int(sum(moments)))
    if run.has_master_weights:
        return replace(profile, weight_bytes=2, gradient_bytes=2, state_bytes=4 + int(sum(moments)))
    narrow = sum(min(one, 2.0) for one in moments)
    # Sharded weights count as optimizer state: here the 16-bit weight itself.
    return replace(profile, weight_bytes=2, gradient_bytes=2, state_bytes=int(narrow) + (2 if is_fully_sharded else 0))
