"""Where an adapter's weights lie in PEFT's files: a module of the model, and which rows of its outputs.

GPT-2 holds queries, keys and values in one module, so that our three adapters are one of PEFT's: their A's one above
the other, their B's along the diagonal, with a rank and an alpha that are this many times ours (`rank_pattern`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt

from plait.interop.families import MODEL_FAMILIES
from plait.interop.stored_names import stored_name
from plait.model.adapter_shape import AdapterTarget
from plait.model.names import EMBEDDING, HEAD
from plait.model.shape import ModelShape, linear_layers_in, weight_sizes
from plait.model.weights import SAVED_TABLES

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftModule:
    """One module of a model with an adapter of PEFT's, and what of it are adapters of ours."""

    name: str
    """PEFT's name of the module: "model.layers.0.self_attn.q_proj"."""
    short: str
    """The end of the name that no other kind of module shares: an entry of `target_modules`."""
    outputs: tuple[int, ...]
    """Those of each part of its outputs, which is a linear layer of ours."""
    targets: Mapping[int, AdapterTarget]
    """Our target for each part, among those that have adapters."""
    layer: int

    @property
    def parts(self) -> int:
        """How many linear layers of ours it holds, adapted or not."""
        return len(self.outputs)

    def outputs_of(self, part: int, whole: int) -> slice:
        """The position of a part's outputs in a module of `whole` outputs."""
        if whole != sum(self.outputs):  # of another base: equal parts of what there is
            each = whole // self.parts
            return slice(part * each, (part + 1) * each)
        first = sum(self.outputs[:part])
        return slice(first, first + self.outputs[part])

    @property
    def magnitude_key(self) -> str:
        """The name of DoRA's tensor [out] there."""
        return f"{PEFT_PREFIX}{self.name}.lora_magnitude_vector"

    def key(self, letter: str) -> str:
        """The name of its tensor "A" or "B" in adapter_model.safetensors."""
        return f"{PEFT_PREFIX}{self.name}.lora_{letter}.weight"


def peft_modules(family: str, shape: ModelShape, targets: tuple[AdapterTarget, ...]) -> list[PeftModule]:
    """Every module of PEFT's that holds adapters of these targets, layer by layer."""
    table, sizes = MODEL_FAMILIES[family].names, weight_sizes(replace(shape, adapter=None))
    found: list[PeftModule] = []
    for layer in range(shape.layers):
        modules: dict[str, tuple[tuple[int, ...], dict[int, AdapterTarget]]] = {}
        present = linear_layers_in(shape, layer)
        for target in targets:
            if target not in present:
                continue
            weight = f"layers.{layer}.{target}.weight"
            stored, own = stored_name(table, weight), sizes[weight][0]
            outputs = tuple(sizes[one][0] for one in stored.stack) or (own,) * stored.parts
            part = stored.stack.index(weight) if stored.stack else stored.part
            modules.setdefault(stored.name.removesuffix(".weight"), (outputs, {}))[1][part] = target
        found += [
            PeftModule(name=name, short=_short(family, name), outputs=outputs, targets=own, layer=layer)
            for name, (outputs, own) in modules.items()
        ]
    return found


def saved_tables(family: str) -> dict[str, str]:
    """PEFT's names of the modules that are the vocabulary's tables ("model.embed_tokens"), by our names of their
    weights."""
    names = MODEL_FAMILIES[family].names
    return {table: names[table].name.removesuffix(".weight") for table in (EMBEDDING, HEAD)}


def written_tables(shape: ModelShape, family: str) -> dict[str, str]:
    """The tables that are stored with a model's adapter, PEFT's names by ours. Of tied ones, PEFT stores both."""
    saved = shape.adapter.modules_to_save if shape.adapter else ()
    return {
        table: name
        for table, name in saved_tables(family).items()
        if SAVED_TABLES[table] in saved or (saved and shape.tied)
    }


def saved_key(module: str) -> str:
    """The name of a module's weight in adapter_model.safetensors if the module is stored whole."""
    return f"{PEFT_PREFIX}{module}.weight"


def _short(family: str, name: str) -> str:
    # GPT-2's attention and feedforward both end with a c_proj.
    return ".".join(name.split(".")[-2:]) if family == "gpt2" else name.rpartition(".")[2]


def adapter_config(shape: ModelShape, family: str, modules: list[PeftModule], base: str) -> dict[str, object]:
    """The keys of adapter_config.json for a model with an adapter; `base` is the name or folder of the model that the
    adapter belongs to."""
    adapter = shape.adapter
    assert adapter is not None, "a model without an adapter has none to write"
    saved = [name.rpartition(".")[2] for name in written_tables(shape, family).values()]
    fused = {one.short: len(one.targets) for one in modules if one.parts > 1 and len(one.targets) > 1}
    grown = {"lora": float, "rslora": sqrt}[adapter.variant]
    return {
        "alpha_pattern": {name: adapter.alpha * grown(times) for name, times in fused.items()},
        "base_model_name_or_path": base,
        "bias": "none",
        **({"ensure_weight_tying": True} if saved and shape.tied else {}),
        "exclude_modules": None,
        "fan_in_fan_out": family == "gpt2",
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "lora_alpha": _plain(adapter.alpha),
        "lora_bias": False,
        "lora_dropout": adapter.dropout,
        "modules_to_save": saved or None,
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
