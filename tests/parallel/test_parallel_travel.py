"""Gradients that travel as bfloat16: half the numbers' digits, sums in full precision, and copies equal to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plait.launch.values.job import Job
from tests.matrix import few_fast
from tests.parallel.reduce_entries import Branches
from tests.parallel.shard_entries import alone_with
from tests.parallel.test_parallel_reduce import gradient
from tests.parallel.test_parallel_shard import whole_of
from tests.shared_ranks import RanksOf
from tests.trainer.tiny import make_tiny

ROUNDING = 2.0**-7
"""At most half of it for each of two roundings to bfloat16: of what is sent, and of the sum that all are to have."""
STEPS = 2


@pytest.mark.parametrize("workers", few_fast([2, 3], 3))
def test_copies_get_the_same_rounded_sums(reduce_on, tmp_path: Path, workers: int) -> None:
    reduce_on("reduce_branches", workers, json.dumps({"folder": str(tmp_path), "transfer": "bf16"}))
    weights = {name: p.detach() for name, p in Branches().named_parameters()}
    for step in (1, 2):
        first, *others = [load_file(tmp_path / f"step-{step}-rank-{rank}.safetensors") for rank in range(workers)]
        for name, weight in weights.items():
            wanted = gradient(name, weight, step, workers)
            assert all(torch.equal(first[name], other[name]) for other in others), "copies must stay equal"
            assert torch.equal(first[name], first[name].bfloat16().double()), "it was not rounded"
            torch.testing.assert_close(first[name], wanted, rtol=ROUNDING, atol=0)


def test_the_addition_itself_is_not_rounded(reduce_on) -> None:
    """256 and three times 1: in bfloat16 each addition gives 256, and 259 is nearest to 258 and 260."""
    told = reduce_on("reduce_large_and_small", 4)
    assert {tuple(told[rank]["sums"]) for rank in range(4)} == {(260.0,) * 5}


@pytest.mark.parametrize("workers", few_fast([2, 3], 3))
def test_a_library_sums_the_same_in_whole_and_in_parts(reduce_on, workers: int) -> None:
    told = reduce_on("sum_by_library", workers)
    wanted = [number * workers * (workers + 1) / 2 for number in range(1, 13)]
    for rank in range(workers):
        for summed, part in told[rank]["found"]:  # all these sums are numbers of bfloat16 too
            assert summed == wanted
            assert part == wanted[rank * len(part) : (rank + 1) * len(part)]


@pytest.mark.parametrize(("workers", "split"), few_fast([(2, 2), (3, 3), (4, 2)], (4, 2)))
def test_split_sums_are_rounded_and_weights_are_not(reduce_on, tmp_path: Path, workers: int, split: int) -> None:
    asked = {"folder": str(tmp_path), "split": split, "bucket_bytes": 64, "transfer": "bf16"}
    reduce_on("split_branches", workers, json.dumps(asked))
    found = [load_file(tmp_path / f"rank-{rank}.safetensors") for rank in range(workers)]
    for name, parameter in Branches().named_parameters():
        start = parameter.detach()
        wanted, moved = start, torch.zeros_like(start)
        for step in (1, 2):
            change = 0.01 * gradient(name, wanted, step, workers)
            wanted, moved = wanted - change, moved + change.abs()
        for other in found:
            assert torch.equal(other[name], found[0][name]), "ranks must hold the same bits"
            # The second step's gradient follows the first one's error, some 0.4 of it for each worker.
            assert bool(((other[name] - wanted).abs() <= 2 * ROUNDING * moved).all())
        assert not torch.equal(found[0][name], wanted)


@pytest.fixture(scope="module")
def launch() -> Callable[[list[dict[str, Any]], int], None]:
    """Let so many ranks take the steps of these cases."""
    server = RanksOf("tests.parallel.shard_entries")

    def run(cases: list[dict[str, Any]], world_size: int) -> None:
        job = Job(entry="take_steps", argument=json.dumps(cases), world_size=world_size, threads=1)
        server.run(job, on_message=lambda message: None)

    return run


LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"replicate": 2},
        {"shard": 2},
        {"shard": 2, "shard_what": "parameters"},
        # Tied ends: the embedding's gradients meet in the group that the stages' messages travel in.
        {"pipeline": 2, "stage_layers": [1, 1]},
    ],
    4: [
        {"replicate": 2, "shard": 2},
        {"replicate": 2, "shard": 2, "shard_what": "parameters"},
        {"replicate": 2, "pipeline": 2, "stage_layers": [1, 1], "schedule": "gpipe"},
        {"replicate": 2, "tensor": 2},
    ],
}


@pytest.mark.parametrize("world_size", few_fast(LAYOUTS, 2))
def test_every_layout_s_gradients_are_right_to_a_rounding(launch, tmp_path: Path, world_size: int) -> None:
    make_tiny(tmp_path, "model.tied=true", precision="float64")
    shared = {"folder": str(tmp_path), "name": "rounded", "steps": STEPS}
    wanted = alone_with({**shared, "plan": {"micro_sequences": 2}})
    plan = {"micro_sequences": 2, "gradient_transfer": "bf16"}
    cases = [{**shared, "layout": layout, "plan": plan} for layout in LAYOUTS[world_size]]
    launch(cases, world_size)
    for number, case in enumerate(cases):
        ranks = [load_file(tmp_path / f"rounded-{number}-rank-{rank}.safetensors") for rank in range(world_size)]
        worst = max(errors(ranks, wanted))
        # Up to four are added, each rounded by half of ROUNDING of its own size, which may be above the sum's.
        assert 1e-6 < worst < 4 * ROUNDING, f"{case['layout']}: off by {worst:.1e}"
        copies_agree(ranks, case["layout"])


STAGES = [
    {"pipeline": 2, "stage_layers": [1, 1]},
    {"pipeline": 2, "stage_layers": [1, 1], "schedule": "zero-bubble"},
    {"pipeline": 2, "stage_layers": [1, 1], "schedule": "gpipe", "recompute": "full"},
]


def test_what_stages_send_each_other_may_be_rounded_and_then_nothing_else_is(launch, tmp_path: Path) -> None:
    make_tiny(tmp_path, precision="float64")
    shared = {"folder": str(tmp_path), "name": "between", "steps": 1}
    wanted = alone_with({**shared, "plan": {"micro_sequences": 2}})
    plan = {"micro_sequences": 2, "stage_transfer": "bf16"}
    launch([{**shared, "layout": layout, "plan": plan} for layout in STAGES], 2)
    for number, layout in enumerate(STAGES):
        ranks = [load_file(tmp_path / f"between-{number}-rank-{rank}.safetensors") for rank in range(2)]
        worst = max(errors(ranks, wanted))
        # The stream is rounded once on its way, and so is its gradient; layers pass both errors on.
        assert 1e-6 < worst < 4 * ROUNDING, f"{layout}: off by {worst:.1e}"


def errors(ranks: list[dict[str, Tensor]], wanted: dict[str, Tensor]) -> Iterator[float]:
    """Of each part of a gradient, relative to the largest number of its weight's."""
    for found in ranks:
        for key, value in found.items():
            if key.startswith("gradient|"):
                _, name, offset, _ = key.split("|")
                whole = part = whole_of(wanted, "gradient", name)
                for dim, first in enumerate(map(int, offset.split(","))):
                    part = part.narrow(dim, first, value.shape[dim])
                yield float((value - part).abs().max() / whole.abs().max())


def copies_agree(ranks: list[dict[str, Tensor]], layout: dict[str, Any]) -> None:
    """Whoever holds the same part of a weight holds the same bits after the last step."""
    seen: dict[str, Tensor] = {}
    for found in ranks:
        for key, value in found.items():
            if key.startswith("held|"):
                assert torch.equal(seen.setdefault(key, value), value), f"{layout}: copies of {key} differ"
