"""PEFT's adapters with the first weights that plait draws, so that both train the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from plait.interop.base_model import read_base_model
from plait.interop.peft_names import PEFT_PREFIX, peft_modules
from plait.model.adapter_shape import AdapterShape
from plait.model.init import first_value


@torch.no_grad()
def begin_as_plait(model: nn.Module, base: Path, adapter: AdapterShape, seed: int) -> None:
    """Give each adapter the first weights that plait draws from the seed; the second ones are zero in both."""
    read = read_base_model(base)
    shape, weights = replace(read.shape, adapter=adapter), dict(model.named_parameters())
    for module in peft_modules(read.family, read.shape, adapter.targets):
        assert module.parts == 1, "GPT-2's fused adapters are not compared"
        own = weights[f"{PEFT_PREFIX}{module.name}.lora_A.default.weight"]
        [target] = module.targets.values()
        own.copy_(first_value(f"layers.{module.layer}.{target}.lora_a", shape, seed))
