"""Whoever takes how many of a step's sequences, from the start or from any step on: the run learns the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.tiny import make_tiny

STEPS = 9
SEQUENCES = 16
ROUNDING = 2e-6
"""Relative, of losses in float32 after some steps in other orders of addition."""
EQUAL: dict[int, tuple[int, ...]] = {}
UNEQUAL = {0: (12, 4)}
CHANGING = {3: (13, 3), 6: (1, 15)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {"replicate": 2},
    "shard optimizer": {"shard": 2},
    "shard parameters": {"shard": 2, "shard_what": "parameters"},
}


@pytest.fixture(scope="module")
def lost(run_ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[tuple[str, str], dict[str, Any]]]:
    """What each rank told of each layout with each kind of shares."""
    folder: Path = tmp_path_factory.mktemp("shares")
    make_tiny(folder, f"train.batch_tokens={8 * SEQUENCES}")
    kinds = {"equal": EQUAL, "unequal": UNEQUAL, "changing": CHANGING}
    names = [(layout, kind) for layout in LAYOUTS for kind in kinds]
    cases = [{"layout": LAYOUTS[layout], "shares": kinds[kind]} for layout, kind in names]
    told = run_ranks("lose", json.dumps({"folder": str(folder), "steps": STEPS, "cases": cases}), 2)
    return {rank: dict(zip(names, values["cases"], strict=True)) for rank, values in told.items()}


@pytest.mark.parametrize("kind", ["unequal", "changing"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_equal_shares(lost, layout: str, kind: str) -> None:
    wanted = lost[0]["replicate", "equal"]
    for rank in (0, 1):
        found = lost[rank][layout, kind]
        assert found["losses"] == pytest.approx(wanted["losses"], rel=ROUNDING)
        assert found["heldout"] == wanted["heldout"] > 0
    assert wanted["losses"][0] - wanted["losses"][-1] > 0.1, "it must have learned, or nothing could differ"


def test_ranks_took_the_sequences_of_the_newest_shares(lost) -> None:
    newest = {"equal": (8, 8), "unequal": UNEQUAL[0], "changing": CHANGING[6]}
    for layout in LAYOUTS:
        for kind, shares in newest.items():
            assert tuple(lost[rank][layout, kind]["sequences"] for rank in (0, 1)) == shares


def test_only_who_meets_takes_as_many_micro_batches_as_the_others(lost) -> None:
    assert [lost[rank]["replicate", "unequal"]["micros"] for rank in (0, 1)] == [4, 2]
    assert [lost[rank]["shard optimizer", "unequal"]["micros"] for rank in (0, 1)] == [4, 2]
    assert [lost[rank]["shard parameters", "unequal"]["micros"] for rank in (0, 1)] == [4, 4]
