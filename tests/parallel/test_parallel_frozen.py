"""Adapters beside frozen weights in 16 bits: under every split as near to float64 as one process' gradients are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from plait.launch.values.job import Job
from plait.model.adapter_shape import AdapterShape
from plait.model.shape import linear_layers
from plait.model.weights import trained_weights
from plait.planner.plan_file import read_plan
from tests.parallel.precision import gradients_of, squared_errors
from tests.parallel.shard_entries import alone_with
from tests.shared_ranks import RanksOf
from tests.trainer.tiny import make_tiny, put

Launch = Callable[[Any, int], None]
BF16 = {"micro_sequences": 2, "precision": "bf16"}
PARAMETERS = {"shard_what": "parameters"}
SHAPES = {
    "untied": ("run.seed=3", "model.width=24", "model.heads=4", "model.qk_norm=true", "model.tied=false"),
    "tied": ("model.positions=learned", "model.bias=all", "model.tied=true"),
}
STAGES = {"pipeline": 2, "stage_layers": [1, 1]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shard parameters": {"shard": 2, **PARAMETERS},
    "zero-bubble": {**STAGES, "schedule": "zero-bubble"},
    "shard optimizer": {"shard": 2},
    "pipeline": STAGES,
    "three parts, recomputed": {"shard": 3, **PARAMETERS, "recompute": "full"},
    "selective": {"shard": 2, **PARAMETERS, "recompute": "selective"},
    "hybrid": {"replicate": 2, "shard": 2, **PARAMETERS},
    "pipeline of parts": {**STAGES, "shard": 2, **PARAMETERS},
    "parts, tensor": {"shard": 2, "tensor": 2, **PARAMETERS},
    "parts, context": {"shard": 2, "context": 2, **PARAMETERS},
}
EVERY_DAY = (("shard parameters", "untied"), ("zero-bubble", "tied"))
OTHERS = [pair for pair in product(LAYOUTS, SHAPES) if pair not in EVERY_DAY]
Gradients = dict[str, Tensor]


@pytest.fixture(scope="module")
def launch() -> Launch:
    server = RanksOf("tests.parallel.shard_entries")
    return lambda cases, ranks: server.run(
        Job(entry="take_steps", argument=json.dumps(cases), world_size=ranks, threads=1), on_message=print
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny run of each shape that trains adapters; without a base, so that their second weights begin as others."""
    made = {name: tmp_path_factory.mktemp(name) for name in SHAPES}
    for name, folder in made.items():
        config, plan = make_tiny(folder, *SHAPES[name], precision="float64")
        adapter = AdapterShape(rank=3, alpha=6.0, targets=linear_layers(plan.job.shape))
        put(folder, config, replace(plan, job=replace(plan.job, shape=replace(plan.job.shape, adapter=adapter))))
    return made


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, tuple[Gradients, Gradients]]:
    """Of each shape the gradients of one process in float64, and in 16 bits."""
    bases = {shape: {"folder": str(folder), "steps": 1, "layout": {}} for shape, folder in folders.items()}
    plans = ({"micro_sequences": 2}, BF16)
    return {
        shape: tuple(gradients_of(alone_with({**base, "plan": plan})) for plan in plans)
        for shape, base in bases.items()
    }


@pytest.mark.parametrize(
    ("layout", "shape"), [*EVERY_DAY, *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS)]
)
def test_16_bit_adapters_are_as_near_to_float64_as_those_of_one_process(
    launch: Launch,
    folders: dict[str, Path],
    alone: dict[str, tuple[Gradients, Gradients]],
    layout: str,
    shape: str,
) -> None:
    named, folder, (exact, rounded) = LAYOUTS[layout], folders[shape], alone[shape]
    assert exact.keys() == set(trained_weights(read_plan(folder / "plan.json").job.shape))
    ranks = prod(named.get(axis, 1) for axis in ("replicate", "shard", "tensor", "context", "pipeline"))
    name = "-".join(word for word in layout.replace(",", "").split())
    launch([{"folder": str(folder), "steps": 1, "name": name, "plan": BF16, "layout": named}], ranks)
    errors = squared_errors(folder, f"{name}-0", ranks, exact)
    own = {weight: float((rounded[weight] - exact[weight]).square().sum()) for weight in exact}
    assert errors.keys() == own.keys()
    assert 0 < sum(errors.values()) < 2 * sum(own.values())
    size = sum(float(one.square().sum()) for one in exact.values())
    assert 2 * sum(own.values()) < 1e-2 * size, "so near that a wrong gradient would be seen"
