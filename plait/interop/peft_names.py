"""Where an adapter's weights lie in PEFT's files: a module of the model, and which rows of its outputs.

GPT-2 holds queries, keys and values in one module, so that our three adapters are one of PEFT's: their A's one above
the other, their B's along the diagonal, with a rank and an alpha that are this many times ours (`rank_pattern`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from plait.interop.families import MODEL_FAMILIES, stored_name
from plait.model.adapter_shape import AdapterShape, AdapterTarget
from plait.model.shape import ModelShape

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftModule:
    """One module of a model with an adapter of PEFT's, and what of it are adapters of ours."""

    name: str
    """PEFT's name of the module: "model.layers.0.self_attn.q_proj"."""
    short: str
    """The end of the name that no other kind of module shares: an entry of `target_modules`."""
    parts: int
    """Equal parts of its outputs, each a linear layer of ours."""
    targets: Mapping[int, AdapterTarget]
    """Which of our targets each part is, of those that have adapters."""
    layer: int

    def key(self, letter: str) -> str:
        """The name of its tensor "A" or "B" in adapter_model.safetensors."""
        return f"{PEFT_PREFIX}{self.name}.lora_{letter}.weight"


def peft_modules(family: str, shape: ModelShape, targets: tuple[AdapterTarget, ...]) -> list[PeftModule]:
    """Every module of PEFT's that holds adapters of these targets, layer by layer."""
    table, found = MODEL_FAMILIES[family], []
    for layer in range(shape.layers):
        modules: dict[str, tuple[int, dict[int, AdapterTarget]]] = {}
        for target in targets:
            stored = stored_name(table, f"layers.{layer}.{target}.weight")
            _, own = modules.setdefault(stored.name.removesuffix(".weight"), (stored.parts, {}))
            own[stored.part] = target
        found += [
            PeftModule(name=name, short=_short(family, name), parts=parts, targets=own, layer=layer)
            for name, (parts, own) in modules.items()
        ]
    return found


def _short(family: str, name: str) -> str:
    # GPT-2's attention and feedforward both end with a c_proj.
    return ".".join(name.split(".")[-2:]) if family == "gpt2" else name.rpartition(".")[2]


def adapter_config(adapter: AdapterShape, family: str, modules: list[PeftModule], base: str) -> dict[str, object]:
    """The keys of adapter_config.json; `base` is the name or folder of the model that the adapter belongs to."""
    fused = {one.short: len(one.targets) for one in modules if one.parts > 1 and len(one.targets) > 1}
    grown = {"lora": float, "rslora": sqrt}[adapter.variant]
    return {
        "alpha_pattern": {name: adapter.alpha * grown(times) for name, times in fused.items()},
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": None,
        "fan_in_fan_out": family == "gpt2",
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "lora_alpha": _plain(adapter.alpha),
        "lora_bias": False,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "rank_pattern": {name: adapter.rank * times for name, times in fused.items()},
        "revision": None,
        "target_modules": sorted({one.short for one in modules}),
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": adapter.variant == "rslora",
    }


def _plain(number: float) -> float | int:
    return int(number) if number == int(number) else number
