"""What each program makes of its devices: its profile, with the numbers that a configuration keeps weights, gradients
and optimizer state in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.foreign_configs.run_description import Program, RunDescription
from plait.planner.problem.program_profiles import (
    DEEPSPEED_ENGINE,
    HUGGING_FACE,
    LITGPT_PROFILE,
    MEGATRON,
    MEGATRON_2021,
    TORCHTITAN,
    TORCHTITAN_EAGER,
)
from plait.planner.problem.software_profile import SoftwareProfile

PROFILES: Mapping[Program, SoftwareProfile] = {
    "axolotl": HUGGING_FACE,
    "transformers": HUGGING_FACE,
    "torchtitan": TORCHTITAN,
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
_OWN_NUMBERS: tuple[Program, ...] = ("torchtitan", "megatron", "megatron 2021")
"""Programs whose profile says how they keep numbers, whatever the configuration."""
ADAPTER_STATE_BYTES = 12
"""An adapter's weight beyond its 16-bit copy, and its moments, all of which PEFT keeps in float32."""


def knows_optimizer(name: str) -> bool:
    """Whether plait knows the state of an optimizer of this name."""
    return name.replace("-", "_") in _MOMENTS


def profile_of(run: RunDescription, is_fully_sharded: bool) -> SoftwareProfile:
    """The profile that a run is priced with."""
    profile = PROFILES[run.program]
    if run.program == "torchtitan" and not run.compiled:
        profile = TORCHTITAN_EAGER
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
