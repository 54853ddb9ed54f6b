"""Adapters beside frozen weights in 16 bits: under every split as near to float64 as one process' gradients are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.launch.local.run import ForkServer
from plait.launch.values.job import Job
from plait.model.adapter_shape import AdapterShape
from plait.model.shape import linear_layers
from plait.model.weights import trained_weights
from plait.planner.plan_file import read_plan
from tests.entry_tables import entries_of
from tests.parallel.precision import gradients_of, squared_errors
from tests.parallel.shard_entries import alone_with
from tests.trainer.tiny import make_tiny, put

Launch = Callable[[Any, int], None]
PARAMETERS = {"shard_what": "parameters"}
SHAPES = {
    "untied": ("model.width=24", "model.heads=4", "model.qk_norm=true", "model.tied=false"),
    "tied": ("model.positions=learned", "model.bias=all", "model.tied=true"),
}
STAGES = {"pipeline": 2, "stage_layers": [1, 1]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shard parameters": {"shard": 2, **PARAMETERS},
    "shard optimizer": {"shard": 2},
    "pipeline": STAGES,
    "zero-bubble": {**STAGES, "schedule": "zero-bubble"},
}
LONG: dict[str, dict[str, Any]] = {
    "three parts, recomputed": {"shard": 3, **PARAMETERS, "recompute": "full"},
    "selective": {"shard": 2, **PARAMETERS, "recompute": "selective"},
    "hybrid": {"replicate": 2, "shard": 2, **PARAMETERS},
    "pipeline of parts": {**STAGES, "shard": 2, **PARAMETERS},
    "pipeline of parts, zero-bubble": {**STAGES, "shard": 2, **PARAMETERS, "schedule": "zero-bubble"},
    "parts, tensor": {"shard": 2, "tensor": 2, **PARAMETERS},
    "parts, context": {"shard": 2, "context": 2, **PARAMETERS},
}


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    preload = ("torch._dynamo", "plait.trainer.worker", "torch.distributed.fsdp", "tests.parallel.shard_entries")
    with ForkServer(entries_of("tests.parallel.shard_entries", preload=preload), threads=1) as server:
        yield lambda cases, ranks: server.run(
            Job(entry="take_steps", argument=json.dumps(cases), world_size=ranks, threads=1)
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny run of each shape that trains adapters; without a base, so that their second weights begin as others."""
    made = {name: tmp_path_factory.mktemp(name) for name in SHAPES}
    for name, folder in made.items():
        config, plan = make_tiny(folder, *SHAPES[name], precision="float64")
        adapter = AdapterShape(rank=3, alpha=6.0, targets=linear_layers(plan.shape))
        put(folder, config, replace(plan, shape=replace(plan.shape, adapter=adapter)))
    return made


def check(launch: Launch, folder: Path, layout: dict[str, Any]) -> None:
    bf16 = {"micro_sequences": 2, "precision": "bf16"}
    shared = {"folder": str(folder), "steps": 1, "layout": {}}
    exact = gradients_of(alone_with({**shared, "plan": {"micro_sequences": 2}}))
    alone = gradients_of(alone_with({**shared, "plan": bf16}))
    assert exact.keys() == set(trained_weights(read_plan(folder / "plan.json").shape))
    ranks = 1
    for axis in ("replicate", "shard", "tensor", "context", "pipeline"):
        ranks *= layout.get(axis, 1)
    name = "-".join(f"{key}-{value}" for key, value in layout.items() if isinstance(value, int | str))
    launch([{**shared, "name": name, "plan": bf16, "layout": layout}], ranks)
    errors = squared_errors(folder, f"{name}-0", ranks, exact)
    own = {weight: float((alone[weight] - exact[weight]).square().sum()) for weight in exact}
    assert errors.keys() == own.keys()
    size = sum(float(one.square().sum()) for one in exact.values())
    assert 0 < sum(errors.values()) < 2 * sum(own.values()) < 2e-3 * size


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_16_bit_adapters_are_as_near_to_float64_as_those_of_one_process(
    launch: Launch, folders: dict[str, Path], layout: str, shape: str
) -> None:
    check(launch, folders[shape], LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LONG)
def test_16_bit_adapters_are_so_in_mixes(launch: Launch, folders: dict[str, Path], layout: str, shape: str) -> None:
    check(launch, folders[shape], LONG[layout])
