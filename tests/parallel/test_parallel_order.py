"""Sums of gradients travel while backward goes on, and no wait for one lies inside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.launch.values.job import Job
from tests.matrix import few_fast
from tests.shared_ranks import RanksOf
from tests.trainer.tiny import make_tiny

Line = tuple[str, bool]


@pytest.fixture(scope="module")
def server() -> RanksOf:
    return RanksOf("tests.parallel.order_entries")


def noted_by_ranks(server: RanksOf, entry: str, argument: dict[str, Any]) -> dict[int, dict[str, Any]]:
    told: dict[int, dict[str, Any]] = {}
    job = Job(entry=entry, argument=json.dumps(argument), world_size=4, threads=1)
    server.run(job, on_message=lambda message: told.__setitem__(message.rank, dict(message.values)))
    return told


@pytest.mark.parametrize("transfer", few_fast(["float32", "bf16"], "bf16"))
@pytest.mark.parametrize("stream", ["side", "host"])
def test_no_wait_for_a_sum_lies_inside_a_backward_pass(server: RanksOf, stream: str, transfer: str) -> None:
    """Where streams wait, as on GPUs, each wait is beside the arithmetic; where a wait blocks, what is waited for is
    over."""
    noted = noted_by_ranks(server, "sum_split_buckets", {"stream": stream, "transfer": transfer})
    assert len(noted) == 4
    for rank in noted.values():
        lines: list[Line] = [(what, beside) for what, beside in rank["lines"]]
        inside = lines[: [what for what, _ in lines].index("backward ends")]
        held_up = [beside for what, beside in inside if what == "wait"]
        assert all(held_up) if stream == "side" else not held_up
        assert any(what == "isend" for what, _ in inside), "nothing travelled under the backward pass"
        if stream == "side":
            assert held_up, "the second sum of a bucket did not begin under the backward pass"
            assert ("all_reduce" if transfer == "float32" else "isend", True) in inside
            assert lines[-1] == ("join", False), "the arithmetic that follows must come after the sums"
            assert not [line for line in lines if line == ("wait", False)]


def test_copies_of_split_rows_are_summed_while_backward_goes_on(server: RanksOf, tmp_path: Path) -> None:
    make_tiny(tmp_path, "model.layers=4", precision="float64")
    layout = {"replicate": 2, "shard": 2, "shard_what": "parameters"}
    case = {"folder": str(tmp_path), "name": "order", "layout": layout, "plan": {"micro_sequences": 7}}
    noted_by_ranks(server, "sum_copies_of_rows", case)
    for rank in range(4):
        order = [what for what, _ in json.loads((tmp_path / f"order-{rank}.json").read_text())]
        last_layer = max(at for at, what in enumerate(order) if what == "layer")
        before = [what for what in order[:last_layer] if what in ("layer", "all_reduce")]
        assert before.count("all_reduce") >= 2, f"sums that begin before the last layer's backward: {order}"
