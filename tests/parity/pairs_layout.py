"""Proves one layout of a small model that learns from pairs, for a mutated copy of plait: exit code 1 where the layout
computes something else than one process. The argument is one of LAYOUTS."""

from __future__ import annotations

import sys
from dataclasses import replace

from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.small_model import shrunk_plan
from plait.launch.local.run import ForkServer
from plait.layout import Layout
from plait.model.adapter_shape import AdapterShape
from plait.model.shape import ModelShape, linear_layers
from plait.recipe.load import parse_config
from plait.workers import ENTRIES, ForkedWorkers

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


def main(name: str) -> int:
    layout, shares = LAYOUTS[name]
    shape = replace(SHAPE, adapter=AdapterShape(rank=3, alpha=5.0, targets=linear_layers(SHAPE)))
    with ForkServer(ENTRIES) as server:
        verdict = check_gradients(CONFIG, shrunk_plan(CONFIG, shape, layout, shares), ForkedWorkers(server))
    sys.stdout.write("".join(f"{one}: {one.error:.1e}\n" for one in verdict.worst))
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
