"""Ranks meet what of torch is slow to import only where the plan says so, and then it is imported once for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.errors import PlaitError
from plait.launch.local.run import ForkServer
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import Job
from plait.workers import COMPILER, ENTRIES, modules_needed
from tests.entry_tables import entries_of
from tests.matrix import few_fast
from tests.trainer.rank_entries import SLOW_MODULES
from tests.trainer.tiny import make_tiny

MIXTURE = ("model.experts=4", "model.experts_per_token=2", "balance.every=never")
WITHOUT = {
    "one rank": (),
    "replicate": ("layout.replicate=2",),
    "optimizer": ("layout.shard=2", 'layout.shard_what="optimizer"'),
    "tensor": ("layout.tensor=2",),
    "context": ("layout.context=2", "model.heads=2"),
    "sgd": ("optimizer.kind=sgd", "optimizer.momentum=0.9"),
}
PIPELINES = {
    "pipeline": ("layout.pipeline=2",),
    "zero-bubble": ("layout.pipeline=2", 'layout.schedule="zero-bubble"'),
}
WITH = {
    "experts": MIXTURE,
    "parameters": ("layout.shard=2", 'layout.shard_what="parameters"'),
    "full": ('layout.recompute="full"',),
    "selective": ('layout.recompute="selective"',),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    functions = entries_of("tests.trainer.rank_entries").functions
    table = EntryTable(functions=functions, preload=ENTRIES.preload, optional=ENTRIES.optional)
    with ForkServer(table, threads=1) as one:
        yield one


def told(server: ForkServer, folder: Path, named: tuple[str, ...], *, needs: bool) -> tuple[list[Any], bool]:
    _, plan = make_tiny(folder, *named)
    answers: list[Any] = []
    server.run(
        Job(
            entry="meet_the_compiler",
            argument=str(folder),
            world_size=plan.world_size,
            threads=1,
            needs=modules_needed(plan) if needs else (),
        ),
        on_message=lambda message: answers.append(dict(message.values)),
    )
    assert len(answers) == plan.world_size
    return answers, bool(modules_needed(plan))


@pytest.mark.parametrize("layout", few_fast(WITHOUT, "one rank"))
def test_a_plain_plan_never_meets_it(server: ForkServer, tmp_path: Path, layout: str) -> None:
    answers, needed = told(server, tmp_path, WITHOUT[layout], needs=True)
    assert not needed and all(not one["after"] for one in answers)


@pytest.mark.slow
@pytest.mark.parametrize("layout", PIPELINES)
def test_ranks_of_a_pipeline_find_what_autograd_asks(server: ForkServer, tmp_path: Path, layout: str) -> None:
    answers, needed = told(server, tmp_path, PIPELINES[layout], needs=True)
    assert needed and all(one["before"] == one["after"] == ["sympy"] for one in answers)


@pytest.mark.slow
@pytest.mark.parametrize("layout", WITH)
def test_ranks_that_meet_it_find_it_there(server: ForkServer, tmp_path: Path, layout: str) -> None:
    without, needed = told(server, tmp_path, WITH[layout], needs=False)
    assert needed and all("torch._dynamo" not in one["before"] and "torch._dynamo" in one["after"] for one in without)


def test_a_host_that_lacks_it_says_so(server: ForkServer, tmp_path: Path) -> None:
    job = Job(entry="meet_the_compiler", argument="", world_size=1, threads=1, needs=("surprise",))
    with pytest.raises(PlaitError, match="no job named 'surprise' on this host; install the same commit of plait"):
        server.run(job, on_message=lambda message: None)
    assert COMPILER in ENTRIES.optional


def test_what_a_job_needs_is_imported_before_its_ranks_begin(server: ForkServer, tmp_path: Path) -> None:
    answers, _ = told(server, tmp_path, WITH["parameters"], needs=True)  # the last: this server has it from now on
    assert all(one["before"] == one["after"] == list(SLOW_MODULES) for one in answers)
