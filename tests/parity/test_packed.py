"""Whole examples with marks: packed, padded, one at a time and by plain torch are the same sums; and over layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.small_model import shrunk_plan
from plait.layout import Layout
from plait.recipe.load import parse_config
from plait.workers import ForkedWorkers
from tests.matrix import few_fast
from tests.parity.cases import FAMILIES
from tests.parity.conftest import CallMutant
from tests.parity.packed_case import WAYS, largest_error, losses_and_gradients

MUTANTS = sorted((Path(__file__).parent / "packed_mutants").glob("*.patch"))
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


@pytest.mark.parametrize("patch", MUTANTS, ids=lambda patch: patch.stem)
def test_a_mutant_of_packing_is_caught(patch: Path, call_mutant: CallMutant) -> None:
    assert call_mutant(patch, "error_of_packing") > 1e-4


@pytest.mark.parametrize("name", few_fast(QUICK, "pipeline × context"))
def test_a_layout_computes_what_one_process_computes(name: str, workers: ForkedWorkers) -> None:
    check(*QUICK[name], workers)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_any_mix_computes_what_one_process_computes(name: str, workers: ForkedWorkers) -> None:
    check(*LONG[name], workers)


def check(family: str, layout: Layout, workers: ForkedWorkers) -> None:
    verdict = check_gradients(CHAT, shrunk_plan(CHAT, FAMILIES[family], layout), workers)
    assert verdict.ok, "\n".join(f"{one}: {one.error:.1e}" for one in verdict.worst)
