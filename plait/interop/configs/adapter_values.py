"""PEFT's adapter_config.json: keys that change a model's numbers are read, or refused by name.

The meaning and default of a key follow PEFT's own LoraConfig.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from plait.errors import PlaitError

_OFF: Mapping[str, tuple[object, ...]] = {
    "lora_bias": (False, None),
    "bias": ("none", None),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None,),
}
"""Keys for options that plait does not compute, with the values that turn them off."""
_INITIAL = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""Values of init_lora_weights that leave the model's own weights unchanged."""
_KNOWN = frozenset(
    {
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
        "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
        "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core",
        "merge_weights", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
        "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora",
    }
)  # fmt: skip
"""Keys that plait reads, or that have no effect by themselves: settings of an initialization count only with
init_lora_weights, and the group width of QA-LoRA only with use_qalora."""

_USUAL: Mapping[str, Any] = {"lora_alpha": 8, "r": None}
"""PEFT's default; the rank has none and must be given."""
MATCH_S, _MATCH_BYTES = 2, 1 << 29
_MATCHER = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({MATCH_S}, {MATCH_S}))
resource.setrlimit(resource.RLIMIT_AS, ({_MATCH_BYTES}, {_MATCH_BYTES}))
keys, modules = json.load(sys.stdin)
try:
    compiled = [re.compile(rf"(.*\\.)?({{key}})$") for key in keys]
    found = [next((n for n, key in enumerate(compiled) if key.match(module)), None) for module in modules]
except (re.error, RecursionError, OverflowError, MemoryError) as error:
    found = {{"error": str(error) or type(error).__name__}}
json.dump(found, sys.stdout)
"""
"""Matches each module against the keys, within limits of CPU time and memory."""


def check_adapter_values(file: Path, values: Mapping[str, Any]) -> None:
    """Raise PlaitError naming the first key that makes the adapter more than plain LoRA."""
    kind = values.get("peft_type")
    if kind != "LORA":
        raise PlaitError(f"{file} is of the kind {str(kind)[:20]}; plait reads only LORA adapters")
    start = values.get("init_lora_weights")
    if start not in _INITIAL:
        raise PlaitError(
            f"init_lora_weights in {file} is {start!r:.40}: this adapter belongs to weights that PEFT changed before "
            "training; convert it to plain LoRA with PEFT's path_initial_model_for_weight_conversion, or merge it"
        )
    for key, value in values.items():
        # PEFT adds kinds of adapters with each version, each with its own key.
        known = value in _OFF[key] if key in _OFF else key in _KNOWN or not value
        if not known:
            raise PlaitError(
                f"{key[:80]} in {file} is {str(value)[:40]}, which plait does not compute; use an adapter of plain "
                "LoRA, or merge this one into its model with PEFT"
            )


def alphas_of(file: Path, values: Mapping[str, Any], modules: Sequence[str]) -> list[float]:
    """The alpha of each module, given by full name: from the first key of alpha_pattern that, as a regular expression,
    matches the end of its name from a dot on, else lora_alpha. Raises PlaitError if one is not a number above 0."""
    found = _named_values(file, values, modules, "alpha_pattern", "lora_alpha")
    for name, alpha in found:
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not (alpha > 0 and isfinite(alpha)):
            raise PlaitError(f"{name} in {file} is {alpha!r:.40}; it should be a number above 0")
    return [float(alpha) for _, alpha in found]


def ranks_of(file: Path, values: Mapping[str, Any], modules: Sequence[str]) -> list[int]:
    """The rank of each module, from rank_pattern and r, as for alphas. Raises PlaitError if one is not a whole number
    above 0."""
    found = _named_values(file, values, modules, "rank_pattern", "r")
    for name, rank in found:
        if type(rank) is not int or not 0 < rank < 2**20:
            raise PlaitError(f"{name} in {file} is {rank!r:.40}; it should be a whole number above 0")
    return [rank for _, rank in found]


def _named_values(
    file: Path, values: Mapping[str, Any], modules: Sequence[str], pattern: str, usual: str
) -> list[tuple[str, Any]]:
    """For each module the value from a pattern, or else the default, with the name of its key."""
    table, otherwise = values.get(pattern) or {}, values.get(usual, _USUAL[usual])
    if not isinstance(table, Mapping):
        raise PlaitError(f"{pattern} in {file} is not a table of modules and numbers; correct it")
    keys = _first_matches(file, pattern, [*table], modules) if table else [None] * len(modules)
    return [(usual, otherwise) if key is None else (pattern, table[key]) for key in keys]


def _first_matches(file: Path, pattern: str, keys: list[str], modules: Sequence[str]) -> list[str | None]:
    """For each module the first key that matches it as in PEFT's get_pattern_key, or None.

    The keys are a stranger's regular expressions, and nested quantifiers can take exponential time: they are matched in
    a separate process that the system ends after two seconds of CPU time.
    """
    request = json.dumps([keys, modules])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _MATCHER], input=request, capture_output=True, text=True, check=False
    )
    if done.returncode < 0:
        raise PlaitError(
            f"{pattern} in {file} has a key that takes more than {MATCH_S} s to match with the names of "
            f"{len(modules)} modules; write module names instead of regular expressions"
        )
    answer = json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr.strip()[-200:]}
    if isinstance(answer, dict):
        raise PlaitError(
            f"{pattern} in {file} has a key that is not a regular expression ({answer['error']}); correct it"
        )
    return [None if place is None else keys[place] for place in answer]
