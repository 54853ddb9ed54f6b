"""Writes an adapter as PEFT's files: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from plait.interop.peft_names import PeftModule, adapter_config, peft_modules, saved_key, written_tables
from plait.model.names import ADAPTER_A, ADAPTER_B, EMBEDDING
from plait.model.shape import ModelShape

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_KEY = "plait.base"
"""Key of the weights' metadata that holds the fingerprint of the base."""
QUANTIZATION_KEY = "plait.quantization"
"""Key of the weights' metadata that says in what the base was kept, where it was quantized."""
ReadAdapter = Callable[[str], Tensor]
"""Our name of an adapter's weight to the whole of it."""


def write_adapter(
    folder: Path, shape: ModelShape, family: str, read: ReadAdapter, *, base: str, fingerprint: str, dtype: torch.dtype
) -> None:
    """Write both files into an existing folder, for a model that PEFT finds under the name or path `base`; raises
    OSError where the disk refuses."""
    adapter = shape.adapter
    assert adapter is not None, "a model without an adapter has none to write"
    modules = peft_modules(family, shape, adapter.targets)
    config = adapter_config(shape, family, modules, base)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors: dict[str, Tensor] = {}
    for module in modules:
        a, b = _module_weights(module, read)
        tensors |= {module.key("A"): a.to(dtype).contiguous(), module.key("B"): b.to(dtype).contiguous()}
    for table, module in written_tables(shape, family).items():
        tensors[saved_key(module)] = read(EMBEDDING if shape.tied else table).to(dtype).clone()
    metadata = {"format": "pt", **({BASE_KEY: fingerprint} if fingerprint else {})}
    if adapter.quantization != "none":
        metadata[QUANTIZATION_KEY] = adapter.quantization
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata=metadata)


def _module_weights(module: PeftModule, read: ReadAdapter) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank] of one of PEFT's modules: ours, or several of ours as one."""
    owned = sorted(module.targets)
    pairs = [
        [read(f"layers.{module.layer}.{module.targets[part]}.{letter}") for letter in (ADAPTER_A, ADAPTER_B)]
        for part in owned
    ]
    if module.parts == 1:
        return pairs[0][0], pairs[0][1]
    rank, outputs = pairs[0][0].shape[0], sum(module.outputs)
    b = torch.zeros(outputs, len(owned) * rank, dtype=pairs[0][1].dtype)
    for place, (part, (_, own)) in enumerate(zip(owned, pairs, strict=True)):
        b[module.outputs_of(part, outputs), place * rank : (place + 1) * rank] = own
    return torch.cat([a for a, _ in pairs]), b
