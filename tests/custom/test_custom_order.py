"""Where examples choose layers and weights are sharded, the numbers are right or a sentence says why not: nobody waits
for a worker that does not come."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from plait.errors import PlaitError
from plait.launch.values.job import Job
from tests.matrix import few_fast
from tests.shared_ranks import RanksOf

RANKS = 3
QUICK, SEEDS = (0, 3, 6, 7), 60
"""Layers inside of a unit; alike on all; unlike ones in parts, and one example after the other."""


@pytest.fixture(scope="module")
def server() -> RanksOf:
    return RanksOf("tests.custom.order_entries")


def told_by(server: RanksOf, entry: str, argument: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    job = Job(entry=entry, argument=argument, world_size=RANKS, threads=1)
    server.run(job, on_message=lambda message: found.update(message.values))
    return found


def drawn(seed: int) -> dict[str, Any]:
    """A program; the first seeds have each kind that must be right."""
    draw = random.Random(seed)
    return {
        "seed": seed,
        "form": ("rows", "each")[seed % 2],
        "choice": "alike" if seed in (2, 3) else draw.choice(["alike", "own", "own"]),
        "place": "inside" if seed < 2 else draw.choice(["units", "inside", "whole"]),
        "chosen_in": draw.choice(["both", "training", "evaluation"]),
        "accumulate": draw.choice([1, 2]),
    }


@pytest.mark.parametrize("seed", few_fast(range(SEEDS), *QUICK))
def test_layers_that_examples_choose_are_right_or_told(server: RanksOf, seed: int) -> None:
    asked = drawn(seed)
    must_be_right = asked["choice"] == "alike" or asked["place"] != "units"
    try:
        assert told_by(server, "train", json.dumps(asked))["error"] < 1e-12, asked
    except PlaitError as refusal:
        assert not must_be_right, (asked, str(refusal))
        assert "workers run different layers" in str(refusal), asked


@pytest.mark.parametrize("then", few_fast(["step", "weights", "save"], "step"))
def test_a_model_that_one_worker_calls_alone_is_told(server: RanksOf, then: str) -> None:
    with pytest.raises(PlaitError, match="workers run different layers"):
        told_by(server, "call_alone", then)


@pytest.mark.parametrize("chosen", few_fast([[0, 1, 1], [0, 0, -1]], [0, 0, -1]))
def test_batch_norms_that_examples_choose_are_told(server: RanksOf, chosen: list[int]) -> None:
    told_by(server, "choose_norms", json.dumps([1, 1, 1]))
    with pytest.raises(PlaitError, match=r"workers run different layers.* the statistics of norms\.\d"):
        told_by(server, "choose_norms", json.dumps(chosen))
