"""What each program makes of its devices: its profile, with the numbers that a configuration keeps weights, gradients
and optimizer state in, and what it holds at times that no other program does."""

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
"""Bytes of an optimizer's two moments for each weight in float32; moments of four bytes have two where the weight has
two, unless float32 weights are kept beside it."""
_OWN_NUMBERS: tuple[ForeignProgram, ...] = ("torchtitan", "torchtitan 2024", "megatron", "megatron 2021")
"""Programs whose profile says how they keep numbers; the configuration does not change it."""
ADAPTER_STATE_BYTES = 12
"""An adapter's weight beyond its 16-bit copy, and its moments, all of which PEFT keeps in float32."""


def knows_optimizer(name: str) -> bool:
    """Whether plait knows the state of an optimizer of this name."""
    return name.replace("-", "_") in _MOMENTS


KEEPS_16_BITS: tuple[ForeignProgram, ...] = ("torchtitan", "torchtitan 2024")
"""Programs whose products in 8 bits keep what they read in 16 for the backward pass (torchtitan's tables: 77.0 and
76.8 GiB)."""
LOGIT_BYTES_IN_PIECES, LOGITS_IN_PIECES = 1.0, 2.0**27
"""A fused loss holds a part of the logits at a time."""
QUANTIZED_KEPT = 15.0
"""Bytes that litgpt keeps per token, layer and unit of width where the layers' matrices are quantized: copies of what
they read, in the numbers that they compute in. By its tables of four models (13 to 18), October 2023."""
NORM_COPIES = 7.0
"""The same of an RMSNorm computed in float32 by single operations; by its tables of Llama 2."""


def profile_of(run: RunDescription, workload: Workload, candidates: Candidates) -> SoftwareProfile:
    """The profile that a run is priced with."""
    profile = PROFILES[run.program]
    if run.program in ("torchtitan", "torchtitan 2024") and not run.compiled:
        profile = TORCHTITAN_EAGER
    if run.loss == "in pieces":
        profile = replace(profile, logit_copies_bytes=LOGIT_BYTES_IN_PIECES, logits_at_once=LOGITS_IN_PIECES)
    if run.adapter_rank and run.program == "litgpt":
        # A frozen matrix does not need what it reads: without a gate, the activation's result is not kept.
        held = profile.stream_held_bytes + (NORM_COPIES if workload.gated else -2.0 * workload.ffn / workload.width)
        profile = replace(profile, stream_held_bytes=held)
    return _with_numbers(profile, run, bool(candidates.is_fully_sharded[0]))


def held_besides(run: RunDescription, workload: Workload, candidates: Candidates) -> dict[str, float]:
    """Bytes by item that a program holds and its profile does not count."""
    found = {"parameters": 0.0, "gradients": 0.0, "gathered": 0.0, "activations": 0.0}
    common, experts = layer_parameters(workload, candidates)
    stage = workload.layers * float(common[0] + experts[0]) / float(candidates.pipeline[0])
    shard = float(candidates.shard[0])
    tokens = float(local_tokens(workload, candidates)[0])
    if run.program == "litgpt" and run.quantized_bits and run.recompute == "none":
        found["activations"] += QUANTIZED_KEPT * workload.width * workload.layers * tokens
    if run.program == "litgpt" and shard > 1 and not run.adapter_rank and _accumulates(workload, candidates):
        # Gradients are summed over ranks once a step, and until then whole on each (FSDP's no_sync).
        found["gradients"] += 2.0 * workload.parameters * (1 - 1 / shard)
    if run.program in ("torchtitan", "torchtitan 2024") and run.layout.pipeline > 1 and shard > 1:
        # In a pipeline, weights stay gathered (16 bits) and gradients whole (32 bits) until all micro-batches are done.
        found["gathered"] += 6.0 * stage * (1 - 1 / shard)
    return found


def loading_bytes(run: RunDescription, workload: Workload, candidates: Candidates) -> float:
    """Bytes on a device while a program loads a model before it shards it; 0 where it loads it in parts."""
    shard = float(candidates.shard[0])
    if run.program != "litgpt" or shard == 1:
        return 0.0
    return workload.parameters * float(4 if run.weights == "float32" else 2) * (1 + 1 / shard)


def _accumulates(workload: Workload, candidates: Candidates) -> bool:
    each = float(candidates.data_parallel_degree[0]) * float(candidates.micro_sequences[0])
    return workload.batch_sequences > each


def _with_numbers(profile: SoftwareProfile, run: RunDescription, is_fully_sharded: bool) -> SoftwareProfile:
    """The profile with the numbers in which this run keeps weights, gradients and optimizer state."""
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
    # Sharded weights are priced as the optimizer's own: here the 16-bit weight itself.
    return replace(profile, weight_bytes=2, gradient_bytes=2, state_bytes=int(narrow) + (2 if is_fully_sharded else 0))
