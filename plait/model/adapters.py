"""Adapters put into the weights that they stand beside: a plain model that computes the same."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.model.gpt import GPT, share_kept_values
from plait.model.linear import Linear


def merged_weight(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """The weight [out, in] that alone gives what it gives together with its adapter: computed in float64, rounded once
    to the weight's own precision."""
    return (weight.double() + scale * (lora_b.double() @ lora_a.double())).to(weight.dtype)


def directed_weight(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float, magnitude: Tensor) -> Tensor:
    """The weight [out, in] that alone gives what it gives together with a DoRA adapter (Liu et al. 2024): each row of
    weight and product together, at the length that `magnitude` [out] says."""
    rows = weight.double() + scale * (lora_b.double() @ lora_a.double())
    return (magnitude.double().unsqueeze(1) / rows.norm(dim=1, keepdim=True) * rows).to(weight.dtype)


@torch.no_grad()
def merge_adapters(model: GPT) -> GPT:
    """A whole model without adapters that computes what this one computes, with separate weights."""
    sources = dict(model.named_parameters())
    first = next(iter(sources.values()))
    with torch.device("meta"):
        plain = GPT(replace(model.shape, adapter=None), model.part).to(first.dtype)
    plain.to_empty(device=first.device)
    for name, parameter in plain.named_parameters():
        path, _, kind = name.rpartition(".")
        layer = model.get_submodule(path)
        if kind == "weight" and isinstance(layer, Linear) and layer.lora_a is not None and layer.lora_b is not None:
            parameter.copy_(merged_weight(layer.weight, layer.lora_a, layer.lora_b, layer.scale))
        else:
            parameter.copy_(sources[name])
    share_kept_values(model, plain)
    return plain
