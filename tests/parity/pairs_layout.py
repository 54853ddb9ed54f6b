"""Plans of a small model that learns from pairs, in the layouts in which mutants show."""

from __future__ import annotations

from dataclasses import replace

from plait.commands.verifying.small_model import shrunk_plan
from plait.layout import Layout
from plait.model.adapter_shape import AdapterShape
from plait.model.shape import ModelShape, linear_layers
from plait.planner.plan import Plan
from plait.recipe.load import parse_config

CONFIG = parse_config(
    {
        "data": {"files": "none"},
        "model": {"from": "none"},
        "finetune": {"method": "lora", "objective": "dpo", "beta": 0.5},
        "run": {"name": "pairs"},
    }
)
SHAPE = ModelShape(layers=8, width=64, heads=8, kv_heads=4, head_width=8, ffn=128, vocabulary=256, sequence=64)
LAYOUTS: dict[str, tuple[Layout, tuple[int, ...]]] = {
    "unequal": (Layout(replicate=2), (3, 1)),
    "context": (Layout(context=2), ()),
    "tensor": (Layout(tensor=2), ()),
}


def plan_of(name: str) -> Plan:
    layout, shares = LAYOUTS[name]
    shape = replace(SHAPE, adapter=AdapterShape(rank=3, alpha=5.0, targets=linear_layers(SHAPE)))
    return shrunk_plan(CONFIG, shape, layout, shares)
