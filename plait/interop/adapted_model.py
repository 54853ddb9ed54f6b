"""A model with an adapter beside its weights, which several adapters of one base may share."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from plait.interop.adapter_in import LoadedAdapter
from plait.model.gpt import GPT


@torch.no_grad()
def with_adapter(model: GPT, adapter: LoadedAdapter) -> GPT:
    """A model of the same weights, which it shares with `model`, and an adapter of its own. `model` has none."""
    with torch.device("meta"):
        adapted = GPT(replace(model.shape, adapter=adapter.shape), model.part)
    base = dict(model.named_parameters())
    like = next(iter(base.values()))
    for name, _ in list(adapted.named_parameters()):
        own = base[name].data if name in base else adapter.weights[name].to(like.device, like.dtype)
        path, _, leaf = name.rpartition(".")
        setattr(adapted.get_submodule(path), leaf, nn.Parameter(own, requires_grad=False))
    return adapted.eval()
