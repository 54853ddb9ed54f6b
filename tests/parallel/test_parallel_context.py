"""The context strand: whichever rank has a token, its attention and all gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.launch.values.job import Job, Message
from tests.matrix import few_fast
from tests.parallel.context_entries import CASES, MODELS
from tests.shared_ranks import RanksOf
from tests.trainer.tiny import make_tiny

ContextOn = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def context_on() -> ContextOn:
    """Run an entry of context_entries on so many ranks, and return all that they told."""
    server = RanksOf("tests.parallel.context_entries")

    def run(entry: str, world_size: int, argument: str = "") -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []

        def hear(message: Message) -> None:
            told.append({"rank": message.rank, **message.values})

        job = Job(entry=entry, argument=argument, world_size=world_size, threads=1)
        server.run(job, on_message=hear)
        return told

    return run


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    return str(folder / "plan.json")


@pytest.mark.parametrize("ranks", few_fast([2, 3, 4], 3))
def test_output_and_gradients_are_those_of_one_process(context_on: ContextOn, ranks: int) -> None:
    told = context_on("attend_cases", ranks)
    assert len(told) == ranks * len(CASES)
    wrong = [one for one in told if max(one["errors"].values()) > 1e-12]
    assert not wrong


def test_lower_precision_joins_its_pieces_without_losing_more(context_on: ContextOn) -> None:
    """One rounding to bfloat16 is 1/256 of a number; sums of such are a little off that."""
    told = context_on("attend_low_precision", 2)
    assert {one["name"] for one in told} == {"bfloat16", "autocast"}
    for one in told:
        assert 1e-4 < max(one["errors"].values()) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_models_have_the_same_gradients(context_on: ContextOn, plan_path: str, ranks: int) -> None:
    told = context_on("gradients_of_model", ranks, plan_path)
    assert len(told) == ranks * len(MODELS)
    wrong = [one for one in told if max(one["errors"]) > 1e-12]
    assert not wrong


def test_an_axis_of_size_1_changes_nothing(context_on: ContextOn, plan_path: str) -> None:
    assert [one["same"] for one in context_on("leave_one_rank_alone", 1, plan_path)] == [True]


def test_no_tensor_grows_with_the_square_of_the_tokens(context_on: ContextOn) -> None:
    told = context_on("largest_tensor", 2)
    for rank in range(2):
        short, long = (one["largest"] for one in told if one["rank"] == rank)
        assert long == 2 * short < 1024 * 512


@pytest.mark.parametrize("tokens", [2048, pytest.param(16384, marks=pytest.mark.slow)])
def test_four_ranks_need_little_more_than_a_quarter_of_the_memory(context_on: ContextOn, tokens: int) -> None:
    told = context_on("peak_of_step", 4, str(tokens))
    (whole,) = (one["bytes"] for one in told if one["name"] == "whole")
    parts = [one["bytes"] for one in told if one["name"] == "part"]
    assert len(parts) == 4
    assert max(parts) <= 0.35 * whole, f"{[part / whole for part in parts]}"
