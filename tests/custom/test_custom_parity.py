"""A spread program's gradients are those of one plain process: float64, 1e-10, whatever the layout and shares."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.launch.values.job import Job, Message
from tests.custom.models import CASES
from tests.shared_ranks import RanksOf

TOLERANCE = 1e-10
REPLICATE: dict[str, Any] = {"layout": "replicate", "shares": "equal", "accumulate": 1, "bucket_mib": 0.0001}
UNEQUAL = {**REPLICATE, "shares": [2, 1]}
OPTIMIZER = {**REPLICATE, "layout": "shard optimizer"}
PARAMETERS = {**REPLICATE, "layout": "shard parameters"}
WAYS = [
    REPLICATE,
    UNEQUAL,
    {**UNEQUAL, "accumulate": 3, "bucket_mib": 8.0},
    OPTIMIZER,
    {**OPTIMIZER, "shares": [1, 3], "accumulate": 2, "bucket_mib": 8.0},
    PARAMETERS,
    {**PARAMETERS, "shares": [1, 2], "accumulate": 2},
]
QUICK = ["mlp", "tied", "unused", "scalar"]


@pytest.fixture(scope="module")
def server() -> RanksOf:
    return RanksOf("tests.custom.parity_entries")


def found_by(server: RanksOf, ranks: int, cases: list[str], ways: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def collect(message: Message) -> None:
        if message.kind == "found":
            found.append(dict(message.values))

    job = Job(
        entry="compare_gradients", argument=json.dumps({"cases": cases, "ways": ways}), world_size=ranks, threads=1
    )
    server.run(job, on_message=collect)
    assert len(found) == sum(way["layout"] not in CASES[case]().refused for case in cases for way in ways)
    return found


def check(found: list[dict[str, Any]]) -> None:
    assert not [one for one in found if not one["error"] < TOLERANCE]


def test_gradients_of_two_ranks_are_those_of_one(server: RanksOf) -> None:
    check(found_by(server, 2, QUICK, WAYS))


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(set(CASES) - set(QUICK)))
def test_gradients_of_every_kind_of_model(server: RanksOf, case: str) -> None:
    check(found_by(server, 2, [case], WAYS))


@pytest.mark.slow
def test_gradients_of_three_ranks_are_those_of_one(server: RanksOf) -> None:
    three = [{**way, "shares": "equal" if isinstance(way["shares"], str) else [3, 1, 2]} for way in WAYS]
    check(found_by(server, 3, ["mlp", "deep", "tied", "encoder", "branches", "graph"], three))
