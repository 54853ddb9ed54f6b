"""Which examples ranks drew: found in their records, whoever wrote the loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from plait.checking.data_order import data_findings, data_not_checked


def events(batches: Sequence[Sequence[int]], *, length: int, grad: bool = True, **about: Any) -> list[dict[str, Any]]:
    """A rank's events of one whole pass over these batches."""
    facts = {
        "dataset_length": length, "sampler": "Sampler", "sampler_length": sum(map(len, batches)), "replicas": None,
        "shuffles": None, "replacement": False, "drop_last": False, "batch_size": 2, "site": "train.py:5", **about,
    }  # fmt: skip
    found: list[dict[str, Any]] = [{"kind": "pass", "loader": 0, "passed": 0, **facts}]
    for batch in batches:
        contents = [f"row {one}" for one in batch]
        found.append({"kind": "draw", "loader": 0, "passed": 0, "indices": list(batch), "content": contents})
        found.append({"kind": "forward", "grad": grad, "inputs": str(batch), "site": "train.py:6"})
    return [*found, {"kind": "pass_ends", "loader": 0, "passed": 0}]


@pytest.mark.parametrize(
    ("first", "second", "length", "grad", "about", "kinds"),
    [
        ([[0, 1], [4, 5]], [[2, 3], [6, 7]], 8, True, {}, []),
        ([[0, 1], [4, 5]], [[0, 1], [4, 5]], 8, True, {}, ["same_batch"]),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], [[7, 2], [0, 5], [1, 6], [3, 4]], 8, True, {}, ["repeated_samples"]),
        ([[0, 1], [4, 5]], [[2, 3], [6, 7]], 16, True, {}, ["samples_left_out"]),
        ([[0, 1]], [[2, 3]], 8, True, {"replicas": 4}, ["samples_left_out"]),
        ([[0, 1], [4, 5]], [[2, 3], [6, 0]], 7, True, {"replicas": 2}, []),  # a sampler's padding
        ([[0, 1], [4, 5]], [[2, 3], [6, 0]], 7, False, {"replicas": 2}, ["evaluation_data"]),
        ([[0, 1], [4, 5]], [[2, 3]], 7, False, {"drop_last": True}, ["evaluation_data"]),
        ([[0, 1], [2, 3]], [[0, 1], [2, 3]], 4, False, {}, []),  # every rank evaluates everything
        ([[0, 0], [1, 1], [2, 0]], [[3, 3], [1, 2], [0, 0]], 8, True, {"replacement": True}, []),
        ([[0, 0], [1, 1], [2, 0]], [[0, 0], [1, 1], [2, 0]], 8, True, {"replacement": True}, ["same_batch"]),
    ],
)
def test_passes(
    first: list[list[int]], second: list[list[int]], length: int, grad: bool, about: dict[str, Any], kinds: list[str]
) -> None:
    ranks = [events(one, length=length, grad=grad, **about) for one in (first, second)]
    assert [one.kind for one in data_findings(ranks)] == kinds


def test_shards_of_their_own_have_no_common_indices() -> None:
    first, second = (events([[0, 1], [2, 3]], length=4) for _ in range(2))
    for event in second:
        if event["kind"] == "draw":
            event["content"] = [f"{one} of rank 1" for one in event["content"]]
    assert data_findings([first, second]) == []


def test_examples_of_a_stream_that_come_on_two_ranks_are_found_by_what_is_in_them() -> None:
    ranks = [events([[at, at + 1] for at in range(rank, 12 + rank, 2)], length=99) for rank in (0, 1)]
    for event in (one for rank in ranks for one in rank if one["kind"] == "draw"):
        event["indices"] = None
    finding = data_findings(ranks)[0]
    assert finding.kind == "repeated_samples" and "11 of the 12 examples that rank 0 drew" in finding.what


def test_an_order_that_cannot_be_known_is_said() -> None:
    ranks = [events([[0, 1], [4, 5]], length=8, dataset_length=None) for _ in range(2)]
    assert ["IterableDataset has no indices" in one for one in data_not_checked(ranks)] == [True]
    assert ["without a DataLoader" in one for one in data_not_checked([[], []])] == [True]
    assert data_not_checked([events([[0, 1], [4, 5]], length=8), events([[2, 3], [6, 7]], length=8)]) == []


def test_batches_without_tensors_are_compared_by_what_the_model_gets() -> None:
    ranks = [events([[0, 1], [4, 5]], length=8, replacement=True) for _ in range(2)]
    for event in (one for rank in ranks for one in rank if one["kind"] == "draw"):
        event |= {"content": [], "indices": None}
    assert [one.kind for one in data_findings(ranks)] == ["same_batch"]
