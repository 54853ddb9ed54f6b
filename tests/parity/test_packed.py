"""Whole examples with marks: packed, padded, one at a time and by plain torch are the same sums; and over layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.small_model import shrunk_plan
from plait.layout import Layout
from plait.recipe.load import parse_config
from plait.workers import ForkedWorkers
from tests.parity.cases import FAMILIES
from tests.parity.mutate import mutated_copy
from tests.parity.packed_case import WAYS, largest_error, losses_and_gradients

ROOT = Path(__file__).parents[2]
MUTANTS = Path(__file__).parent / "packed_mutants"
MUTANT_NAMES = ("leak-over-documents", "unmask-the-prompt", "positions-go-on")
CHAT = parse_config({"data": {"files": "none", "format": "chat"}, "run": {"name": "packed"}})

QUICK: dict[str, tuple[str, Layout]] = {
    "replicate": ("llama", Layout(replicate=3)),
    "pipeline × context": ("qwen2", Layout(pipeline=2, stage_layers=(4, 4), context=2)),
}
LONG: dict[str, tuple[str, Layout]] = {
    "shard parameters": ("gpt2", Layout(shard=2, shard_what="parameters", recompute="full")),
    "tensor": ("qwen3", Layout(tensor=2)),
    "context": ("gpt2", Layout(context=4)),
    "zero-bubble": ("llama", Layout(pipeline=2, stage_layers=(4, 4), schedule="zero-bubble")),
    "interleaved": ("gpt2", Layout(pipeline=2, stage_layers=(2, 3, 2, 1), schedule="interleaved")),
    "shard × context × tensor": ("qwen2", Layout(shard=2, context=2, tensor=2)),
    "pipeline × shard × context": (
        "llama", Layout(pipeline=2, stage_layers=(3, 5), shard=2, context=2, schedule="zero-bubble"),
    ),
    "pipeline × replicate × tensor": ("gpt2", Layout(pipeline=2, stage_layers=(3, 5), replicate=2, tensor=2)),
    "pipeline × context × tensor": ("windows", Layout(pipeline=2, stage_layers=(4, 4), context=2, tensor=2)),
}  # fmt: skip


def test_packed_padded_alone_and_by_hand_are_equal(tmp_path: Path) -> None:
    found = losses_and_gradients(tmp_path)
    assert set(found) == set(WAYS)
    assert found["packed"][1] > 20, "a case with too little to learn proves little"
    assert largest_error(found) < 1e-10


def test_every_mutant_is_tried() -> None:
    assert {path.stem for path in MUTANTS.glob("*.patch")} == set(MUTANT_NAMES)


@pytest.mark.parametrize(
    "name", [MUTANT_NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MUTANT_NAMES[1:])]
)
def test_a_mutant_of_packing_is_caught(name: str, tmp_path: Path) -> None:
    folder = mutated_copy(MUTANTS / f"{name}.patch", tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.parity.packed_case"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) > 1e-4


@pytest.mark.parametrize("name", QUICK)
def test_a_layout_computes_what_one_process_computes(name: str, workers: ForkedWorkers) -> None:
    check(*QUICK[name], workers)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_any_mix_computes_what_one_process_computes(name: str, workers: ForkedWorkers) -> None:
    check(*LONG[name], workers)


def check(family: str, layout: Layout, workers: ForkedWorkers) -> None:
    verdict = check_gradients(CHAT, shrunk_plan(CHAT, FAMILIES[family], layout), workers)
    assert verdict.ok, "\n".join(f"{one}: {one.error:.1e}" for one in verdict.worst)
