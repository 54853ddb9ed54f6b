"""Every kind of layer takes the same steps on a GPU as on a processor, in float32 and compiled in bf16."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.model.adapter_shape import AdapterShape
from plait.model.parts.delta_attention import DeltaAttentionShape
from plait.model.parts.mixture import MixtureShape
from plait.model.parts.objectives import ObjectivesShape
from plait.model.parts.unlike_layers import FullAttentionShape
from plait.model.shape import ModelShape, linear_layers
from tests.gpu.conftest import RunRanks
from tests.trainer.tiny import make_tiny, put

Change = Callable[[ModelShape], ModelShape]
KINDS: dict[str, Change] = {
    "GPT-2's": lambda shape: replace(
        shape, norm="layernorm", activation="gelu", positions="learned", bias="all", tied=True
    ),
    "adapters": lambda shape: replace(shape, adapter=AdapterShape(rank=8, alpha=16.0, targets=linear_layers(shape))),
    "a mixture": lambda shape: replace(shape, mixture=MixtureShape(experts=4, experts_per_token=2, expert_ffn=32)),
    "heads and depths": lambda shape: replace(
        shape, objectives=ObjectivesShape(heads=(1,), head_weights=(0.1,), ahead=1)
    ),
    "windows": lambda shape: replace(shape, windows=(4, 0)),
    "unlike layers": lambda shape: replace(
        shape, layers=4, windows=(4, 0, 4, 0), activation="geglu", norm_places="both", value_norm=True, qk_norm=True,
        layer_multipliers=True, layer_input_width=16, shared_kv_layers=2, shared_kv_ffn=2 * shape.ffn,
        full_attention=FullAttentionShape(head_width=2 * shape.head_width, kv_heads=1, values="keys"),
    ),
    "linear attention": lambda shape: replace(
        shape, attention_gate=True,
        delta=DeltaAttentionShape(layers=(0,), key_heads=2, value_heads=4, key_width=16, value_width=16, taps=4),
    ),
}  # fmt: skip
WIDE = ("model.width=64", "model.heads=4", "layout.replicate=1", "optimizer.lr=0.003")
"""Rows that begin on 16 bytes, as kernels for GPUs want them; and a rate at which bf16's rounding stays rounding: with
ten times as much a mixture's router soon sends tokens elsewhere."""


def losses(run_ranks: RunRanks, folder: Path, device: str, kind: str, **planned: Any) -> list[float]:
    folder.mkdir()
    config, plan = make_tiny(folder, *WIDE, device=device, **planned)
    put(folder, config, replace(plan, job=replace(plan.job, shape=KINDS[kind](plan.job.shape))))
    return run_ranks("take_steps", json.dumps({"folder": str(folder), "steps": 3}), 1)[0]["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_layer_computes_there_what_it_does_here(
    run_ranks: RunRanks, tmp_path: Path, device: torch.device, kind: str
) -> None:
    here = losses(run_ranks, tmp_path / "here", "cpu", kind, precision="float32")
    there = losses(run_ranks, tmp_path / "there", device.type, kind, precision="float32")
    compiled = "blocks" if device.type == "cuda" else "off"
    rounded = losses(run_ranks, tmp_path / "rounded", device.type, kind, precision="bf16", compile=compiled)
    assert there == pytest.approx(here, rel=1e-4)
    assert rounded != there
    assert rounded == pytest.approx(here, rel=1e-2)
    assert len(set(here)) == 3
