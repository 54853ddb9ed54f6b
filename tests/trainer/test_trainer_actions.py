"""Shares of the batch that follow the ranks' speeds: measured in real ranks, recorded, and obeyed again bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plait.layout import Layout
from plait.planner.plan import HostShare
from plait.report.shares_file import read_shares
from plait.trainer.balance.step_history import StepHistory
from tests.trainer import following
from tests.trainer.tiny import make_tiny

Follow = Callable[..., list[dict[str, torch.Tensor]]]
FAST, SLOW = 0.001, 0.004
BATCH = 16
LAYOUTS = {
    "replicate": Layout(replicate=2),
    "shard the optimizer's state": Layout(shard=2),
    "shard parameters": Layout(shard=2, shard_what="parameters"),
    "two pipelines": Layout(replicate=2, pipeline=2, stage_layers=(1, 1)),
}


@pytest.fixture(scope="module")
def follow() -> Follow:
    """Carry out runs in one process group; returns what rank 0 left of each."""

    def run(folder: Path, layout: Layout, *runs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        batch = f"train.batch_tokens={8 * BATCH}"
        following.follow(folder, layout, runs, batch, "layout.micro_sequences=4")
        return [load_file(folder / f"run-{number}-0") for number in range(len(runs))]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicate", "shard parameters", "shard the optimizer's state", "two pipelines"])
def test_a_slow_rank_gets_less_and_more_again_when_it_recovers(tmp_path: Path, follow: Follow, name: str) -> None:
    layout = LAYOUTS[name]
    slow = [SLOW if layout.data_parallel_rank(rank) else FAST for rank in range(layout.world_size)]
    fast = [FAST] * layout.world_size
    phases = [[12, fast], [30, slow], [30, fast]]
    steps = sum(count for count, _ in phases)
    balanced, undisturbed = follow(
        tmp_path, layout, {"every": 10, "phases": phases}, {"every": 0, "phases": [[steps, [0.0] * len(fast)]]}
    )
    torch.testing.assert_close(balanced["losses"], undisturbed["losses"], rtol=1e-5, atol=0)
    lines = read_shares(tmp_path / "shares-0.jsonl")
    assert lines and all(line.step % 10 == 1 and sum(line.shares) == BATCH for line in lines)
    at = {step: next((line.shares for line in reversed(lines) if line.step <= step), (8, 8)) for step in (13, 43, 73)}
    assert at[13] == (8, 8), lines
    assert 3 <= at[43][1] <= 5, lines
    assert 7 <= at[73][1] <= 9, lines
    assert "rank" in lines[0].reason and "slower than" in lines[0].reason, lines


def test_recorded_shares_are_obeyed_bit_for_bit_also_where_none_is_ever_made(tmp_path: Path, follow: Follow) -> None:
    lines = [
        {"step": 4, "shares": [13, 3], "reason": "as a test wrote", "speeds": [1.0, 2.0]},
        {"step": 9, "shares": [5, 11], "reason": "as a test wrote", "speeds": [1.0, 2.0]},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for number in (0, 1):
        (tmp_path / f"shares-{number}.jsonl").write_text(text)
    (tmp_path / "shares-2.jsonl").write_text(text + '{"step": 2, "sha')
    phases = [[12, [0.0, 0.0]]]
    measured, alone, torn, plain = follow(
        tmp_path, LAYOUTS["replicate"], *({"every": every, "phases": phases} for every in (1000, 0, 0, 0))
    )
    for key, value in measured.items():
        assert torch.equal(value, alone[key]) and torch.equal(value, torn[key]), key
    torch.testing.assert_close(measured["losses"], plain["losses"], rtol=1e-5, atol=0)
    assert not torch.equal(measured["losses"], plain["losses"])  # another order of sums: so they were obeyed


def test_a_slow_stage_of_a_pipeline_is_named_and_not_the_one_that_waits_for_it(tmp_path: Path) -> None:
    _, plan = make_tiny(tmp_path, layout=Layout(pipeline=2, stage_layers=(1, 1)))
    hosts = tuple(HostShare(name=name, workers=1, threads=1) for name in ("attic", "cellar"))
    history = StepHistory(
        replace(
            plan, machines=replace(plan.machines, hosts=hosts), cadence=replace(plan.cadence, balance_every_steps=1000)
        )
    )
    told: list[str] = []
    for step in range(1, 161):
        noise = 1 + 0.01 * (step % 3)
        second_s = 0.1 * noise * (2.0 if step > 130 else 1.0)
        # computing, waiting for other parts, for data, for the other stage; messages untimed
        rows = [(0.1 * noise, 0.0, 0.0, 0.02 + second_s - 0.1, 0.0), (second_s, 0.0, 0.0, 0.02, 0.0)]
        told += history.record(step, [[row] for row in rows], plan.sequences_per_replica)
    assert len(told) == 1 and "cellar" in told[0] and "attic" not in told[0].split(":")[0], told
