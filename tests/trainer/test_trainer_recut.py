"""Layers that move between a pipeline's stages while it runs: bit for bit, recorded, and where the speeds say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plait.layout import Layout
from plait.report.shares_file import read_shares
from plait.trainer.balance import move_layers
from tests.matrix import few_fast
from tests.trainer.following import follow

Runs = Callable[..., list[list[dict[str, torch.Tensor]]]]
BATCH = 12
PLAIN = ("optimizer.clip='never'", "model.layers=6")
"""A norm is summed over ranks, in the order of who has what: bits depend on the cut only there."""
LAYOUTS = {
    "two stages": (Layout(pipeline=2, stage_layers=(3, 3)), ()),
    "tied, the last stage keeps the table": (Layout(pipeline=2, stage_layers=(3, 3)), ("model.tied=true",)),
    "three stages, zero-bubble": (Layout(pipeline=3, stage_layers=(2, 2, 2), schedule="zero-bubble"), ()),
    "with tensor": (Layout(pipeline=2, stage_layers=(3, 3), tensor=2), ("model.tied=true",)),
    "with context": (Layout(pipeline=2, stage_layers=(3, 3), context=2), ("model.tied=true",)),
}
CUTS = {2: ([5, 1], [2, 4]), 3: ([1, 4, 1], [3, 1, 2])}


@pytest.fixture(scope="module")
def take() -> Runs:
    """Carry out runs in one process group; returns what every rank left of each."""

    def run(folder: Path, layout: Layout, overrides: tuple[str, ...], *runs: dict[str, Any]) -> Any:
        asked = (f"train.batch_tokens={8 * BATCH}", "layout.micro_sequences=2", *PLAIN, *overrides)
        follow(folder, layout, runs, *asked)
        ranks = range(layout.world_size)
        return [[load_file(folder / f"run-{number}-{rank}") for rank in ranks] for number in range(len(runs))]

    return run


def line(step: int, layers: list[int]) -> str:
    values = {"step": step, "shares": [BATCH], "reason": "as a test wrote", "speeds": [1.0], "stage_layers": layers}
    return json.dumps(values) + "\n"


@pytest.mark.parametrize(
    "name",
    few_fast(LAYOUTS, "tied, the last stage keeps the table"),
)
def test_weights_and_moments_move_bit_for_bit(tmp_path: Path, take: Runs, name: str) -> None:
    """There and elsewhere and back: the losses and the last weights are those of stages that never changed."""
    layout, overrides = LAYOUTS[name]
    away, aside = CUTS[layout.pipeline]
    back = list(layout.stage_layers)
    (tmp_path / "shares-0.jsonl").write_text(line(2, away) + line(3, aside) + line(4, back))
    (tmp_path / "shares-1.jsonl").write_text(line(1, away))  # before there are any moments
    phases = [[5, [0.0] * layout.world_size]]
    moved, other, plain = take(tmp_path, layout, overrides, *({"every": 0, "phases": phases} for _ in range(3)))
    for ours, theirs in zip(moved, plain, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert torch.equal(value, theirs[key]), key
    assert [rank.keys() for rank in other] != [rank.keys() for rank in plain]  # so the lines are obeyed
    whole, own = ({k: v for rank in run for k, v in rank.items() if k != "losses"} for run in (plain, other))
    assert whole.keys() == own.keys()
    if layout.tensor == 1:
        for key, value in whole.items():
            assert torch.equal(value, own[key]), key
    for ours, theirs in zip(other, plain, strict=True):
        assert torch.equal(ours["losses"], theirs["losses"])


@pytest.mark.slow
def test_a_slow_stage_gets_fewer_layers_and_more_again_when_it_recovers(tmp_path: Path, take: Runs) -> None:
    layout = LAYOUTS["two stages"][0]
    phases = [[12, [0.001, 0.001]], [30, [0.001, 0.004]], [30, [0.001, 0.001]]]
    followed, plain = take(
        tmp_path,
        layout,
        (),
        {"every": 10, "in": "all layers", "phases": phases},
        {"every": 0, "phases": [[72, [0.0, 0.0]]]},
    )
    for ours, theirs in zip(followed, plain, strict=True):
        assert torch.equal(ours["losses"], theirs["losses"])
    lines = read_shares(tmp_path / "shares-0.jsonl")
    assert all(one.step % 10 == 1 and sum(one.stage_layers) == 6 and one.shares == (BATCH,) for one in lines), lines
    at = {
        step: next((one.stage_layers for one in reversed(lines) if one.step <= step), (3, 3)) for step in (13, 43, 73)
    }
    assert at[13] == (3, 3) and at[43] == (5, 1), lines
    assert at[73][1] >= 2, lines  # the clock of this test knows no head, so not all is as it was
    assert "rank 1 is" in lines[0].reason and "of 6 layers" in lines[0].reason, lines


@pytest.mark.parametrize(
    ("free", "sharers", "most"), [(20_000, 2, 4), (20_000, 4, 2), (2_000, 2, 0), (900_000, 1, 227)]
)
def test_a_stage_gets_no_more_than_fits_beside_what_is_there(
    monkeypatch: pytest.MonkeyPatch, free: int, sharers: int, most: int
) -> None:
    """Two layers: 4,000 bytes of weights and moments, 8,000 with activations and all else."""
    monkeypatch.setattr(move_layers, "free_memory_bytes", lambda: free / move_layers.SPARE_MEMORY)
    monkeypatch.setattr(move_layers, "peak_rss_bytes", lambda: 8_000)
    stage: Any = SimpleNamespace(
        model=SimpleNamespace(chunks=(SimpleNamespace(layers={"0": None, "1": None}),)),
        tensors=lambda: [torch.zeros(600), torch.zeros(400)],
        device=torch.device("cpu"),
    )
    assert move_layers.max_stage_layers(stage, sharers) == most
