"""Copies of the state in memory: new processes that go on from them have the bits of those that were never killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from plait.launch.local.run import ForkServer
from plait.launch.values.job import Job, Message
from tests.entry_tables import entries_of
from tests.trainer.tiny import make_tiny

RunCopies = Callable[..., dict[int, dict[str, Any]]]
LINEAGES = count(1)
LAYOUTS = {
    "replicate": ("layout.replicate=2",),
    "shard the optimizer": ("layout.replicate=1", "layout.shard=2", "layout.shard_what=optimizer"),
    "shard parameters": ("layout.replicate=1", "layout.shard=2", "layout.shard_what=parameters"),
    "pipeline": ("layout.replicate=1", "layout.pipeline=2"),
    "tensor": ("layout.replicate=1", "layout.tensor=2"),
    "sgd": ("layout.replicate=2", "optimizer.kind=sgd"),
    "experts": ("layout.replicate=2", "model.size=auto", "model.experts=4", "model.expert_balance=bias"),
}
QUICK = "replicate"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    entries = entries_of("tests.trainer.copy_entries", preload=("torch._dynamo", "plait.trainer.worker"))
    with ForkServer(entries, threads=1) as server:
        yield server


@pytest.fixture
def run(server: ForkServer) -> RunCopies:
    def run(entry: str, folder: Path, ranks: int, **asked: Any) -> dict[int, dict[str, Any]]:
        told: dict[int, dict[str, Any]] = {}

        def hear(message: Message) -> None:
            told[message.rank] = dict(message.values)

        argument = json.dumps({"folder": str(folder), **asked})
        server.run(Job(entry=entry, argument=argument, world_size=ranks, threads=1), on_message=hear)
        return told

    return run


def manifest(folder: Path, step: int) -> bytes:
    return (folder / f"step-{step}" / "manifest.json").read_bytes()


def slow_but(quick: str, names: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name == quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS))
def test_new_processes_have_the_bits_of_those_that_made_the_copies(run: RunCopies, tmp_path: Path, layout: str) -> None:
    make_tiny(tmp_path, *LAYOUTS[layout])
    lineage, new = next(LINEAGES), tmp_path / "new"
    new.mkdir()
    told = run("copy_and_save", tmp_path, 2, lineage=lineage, steps=3, new=str(tmp_path / "whole"))
    assert [told[rank]["step"] for rank in (0, 1)] == [3, 3]
    assert all(told[rank]["told"][0] > 0 and told[rank]["told"][1] == 0 for rank in (0, 1))
    restored = run("restore_and_save", tmp_path, 2, lineage=lineage, steps=0, new=str(new), **{"from": 3})
    assert restored[0]["step"] == 3 and restored[0] == restored[1] and restored[0]["position"] == 21
    assert manifest(new, 3) == manifest(tmp_path / "whole", 3)
    run("restore_and_save", tmp_path, 2, lineage=lineage, steps=2, new=str(new), **{"from": 3})
    run("copy_and_save", tmp_path, 2, lineage=next(LINEAGES), steps=5, new=str(tmp_path / "whole"))
    assert manifest(new, 5) == manifest(tmp_path / "whole", 5)


SEVERAL = {
    "pipeline": ("layout.replicate=1", "layout.pipeline=2"),
    "replicate": ("layout.replicate=4",),
    "shard the optimizer": ("layout.replicate=1", "layout.shard=4", "layout.shard_what=optimizer"),
    "replicate and tensor": ("layout.replicate=2", "layout.tensor=2"),
    "pipeline and replicate": ("layout.replicate=2", "layout.pipeline=2"),
}


@pytest.mark.parametrize("layout", slow_but("pipeline", SEVERAL))
def test_each_host_has_all_that_its_ranks_need(run: RunCopies, tmp_path: Path, layout: str) -> None:
    make_tiny(tmp_path, *SEVERAL[layout])
    lineage, new = next(LINEAGES), tmp_path / "new"
    new.mkdir()
    asked, ranks = {"lineage": lineage, "hosts": 2}, 2 if layout == "pipeline" else 4
    run("copy_and_save", tmp_path, ranks, steps=2, new=str(tmp_path / "whole"), **asked)
    restored = run("restore_and_save", tmp_path, ranks, steps=0, new=str(new), **asked, **{"from": 2})
    assert [restored[rank].get("step") for rank in range(ranks)] == [2] * ranks, restored
    assert manifest(new, 2) == manifest(tmp_path / "whole", 2)


def test_where_one_rank_has_no_whole_copy_all_hear_of_it(run: RunCopies, server: ForkServer, tmp_path: Path) -> None:
    make_tiny(tmp_path, "layout.replicate=2")
    lineage, new = next(LINEAGES), tmp_path / "new"
    new.mkdir()
    run("copy_and_save", tmp_path, 2, lineage=lineage, steps=3, new=str(new), spoil=1)
    assert list(server.whole_steps(2, lineage)) == [2], "the newest that both have"
    told = run("restore_and_save", tmp_path, 2, lineage=lineage, steps=0, new=str(new), **{"from": 3})
    assert told[0] == told[1] and "rank 1 has no complete copy of step 3" in told[0]["why"]
    assert list(server.whole_steps(2, lineage)) == [2]


@pytest.mark.slow
def test_a_save_writes_a_copy_and_copies_go_on_beside_it(run: RunCopies, tmp_path: Path) -> None:
    make_tiny(tmp_path, "layout.replicate=2")
    new = tmp_path / "new"
    told = run("save_from_copies", tmp_path, 2, lineage=next(LINEAGES), new=str(new))
    assert told[0] == told[1] and (told[0]["step"], told[0]["failure"]) == (2, "")
    saved, *others = told[0]["slots"]
    assert saved not in others[:3] and len(set(others[:2])) == 2, "the copy that is being saved stays as it is"
    assert all(one != other for one, other in pairwise(others)), "the newest is never replaced"
    run("copy_and_save", tmp_path, 2, lineage=next(LINEAGES), steps=2, new=str(tmp_path / "whole"))
    assert manifest(new / "checkpoints", 2) == manifest(tmp_path / "whole", 2)
