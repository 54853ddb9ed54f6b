"""Compiled layers in each layout: all graphs are there after the first step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.launch.local.run import ForkServer
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import Job
from plait.workers import ENTRIES, modules_needed
from tests.entry_tables import entries_of
from tests.trainer.tiny import make_tiny

PARAMETERS = ("layout.shard=2", 'layout.shard_what="parameters"')
LAYOUTS = {
    "one device": (),
    "recomputed": ('layout.recompute="selective"',),
    "replicate": ("layout.replicate=2",),
    "shard optimizer": ("layout.shard=2", 'layout.shard_what="optimizer"'),
    "shard parameters": PARAMETERS,
    "tensor": ("layout.tensor=2",),
    "context": ("layout.context=2",),
    "pipeline": ("layout.pipeline=2",),
    "pipeline × shard parameters": ("layout.pipeline=2", *PARAMETERS),
    "tensor × shard parameters": ("layout.tensor=2", *PARAMETERS),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    functions = entries_of("tests.trainer.rank_entries").functions
    table = EntryTable(functions=functions, preload=ENTRIES.preload, optional=ENTRIES.optional)
    with ForkServer(table, threads=1) as one:
        yield one


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_step_after_the_first_compiles_anything(server: ForkServer, tmp_path: Path, layout: str) -> None:
    whole_steps = ("train.batch_tokens=48", "data.mask_documents=false")
    _, plan = make_tiny(tmp_path, *LAYOUTS[layout], *whole_steps, compile="blocks")
    answers: list[Any] = []
    needs = modules_needed(plan)
    job = Job(entry="count_graphs", argument=str(tmp_path), world_size=plan.world_size, threads=1, needs=needs)
    server.run(job, on_message=lambda message: answers.append(message.values["graphs"]))
    assert len(answers) == plan.world_size
    assert all(graphs[0] == graphs[-1] >= 1 for graphs in answers)
