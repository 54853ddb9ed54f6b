"""Do both ends of a pipeline have the tied weight's whole gradient, equal to the bit, however early much of it went?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait.launch.job import Job
from plait.launch.local import ForkServer
from tests.parallel.ends_entries import STEPS


@pytest.mark.parametrize(
    ("micros", "ahead", "announced"),
    [(4, True, True), (1, False, True), (3, False, False)],
    ids=["the most of it goes before", "one micro-batch", "nobody announces the last backward"],
)
def test_both_ends_have_the_sum(tmp_path: Path, micros: int, ahead: bool, announced: bool) -> None:
    asked = {"folder": str(tmp_path), "micros": micros, "ahead": ahead, "announced": announced}
    job = Job(entry="tests.parallel.ends_entries:meet", argument=json.dumps(asked), world_size=2, threads=1)
    with ForkServer(preload=("torch.distributed", "tests.parallel.ends_entries"), threads=1) as server:
        server.run(job, on_message=lambda _: None)
    embedding, head = (load_file(tmp_path / f"rank-{rank}.safetensors") for rank in range(2))
    for step in range(STEPS):
        wanted = embedding[f"own-{step}"] + head[f"own-{step}"]
        assert torch.equal(embedding[f"sum-{step}"], wanted)
        assert torch.equal(head[f"sum-{step}"], wanted)
        assert (embedding[f"own-{step}"] == 0).all(dim=1).any(), "some entries have no token, or nothing went before"
