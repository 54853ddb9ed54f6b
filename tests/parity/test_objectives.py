"""Heads in the middle and prediction ahead: gradients of one process written by hand, in every mix of strands."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.small_model import shrunk_plan
from plait.layout import Layout
from plait.model.parts.objectives import ObjectivesShape
from plait.model.shape import ModelShape, weight_sizes
from plait.model.weights import kept_values
from plait.planner.search.validity import check_layout
from plait.recipe.schema import DataSection, RunConfig
from plait.workers import ForkedWorkers
from tests.matrix import few_fast
from tests.parity.cases import FAMILIES, LLAMA, by_turns, covering
from tests.parity.conftest import CallMutant
from tests.parity.objectives_case import SHAPE, all_errors, by_hand
from tests.parity.test_mixtures import DEEPSEEK, EVERY_LOSS

CONFIG = RunConfig(data=DataSection(files="nothing.txt"))
MUTANTS = sorted((Path(__file__).parent / "objective_mutants").glob("*.patch"))
HEADS = ObjectivesShape(heads=(2, 4, 7), head_weights=(0.3, 0.5, 0.2))
AHEAD = ObjectivesShape(ahead=2, ahead_weight=0.6)
BOTH = ObjectivesShape(heads=(3, 6), head_weights=(0.4, 0.2), ahead=2)
KINDS: dict[str, ModelShape] = {
    "heads": replace(LLAMA, objectives=HEADS),
    "ahead": replace(LLAMA, objectives=AHEAD),
    "tied": replace(FAMILIES["qwen2"], objectives=BOTH),
    "gpt2": replace(FAMILIES["gpt2"], objectives=BOTH),
    "windows": replace(FAMILIES["windows"], objectives=BOTH),
    "deepseek": replace(LLAMA, mixture=DEEPSEEK, objectives=replace(AHEAD, ahead=1)),
    "every loss": replace(LLAMA, mixture=replace(EVERY_LOSS, every=1), objectives=BOTH, tied=True),
}
EVERY_DAY: dict[str, tuple[str, Layout]] = {
    "pipeline": ("tied", Layout(pipeline=3, stage_layers=(1, 2, 1), schedule="zero-bubble")),
    "context": ("ahead", Layout(context=2)),
}
_CUT, _VIRTUAL = (2, 2), (1, 2, 2, 1)
LONG: tuple[Layout, ...] = (
    Layout(replicate=3, recompute="full"),
    Layout(shard=2),
    Layout(shard=3, shard_what="parameters", recompute="full"),
    Layout(replicate=2, shard=2, shard_what="parameters"),
    Layout(tensor=2, recompute="selective"),
    Layout(tensor=4),
    Layout(context=2, recompute="full"),
    Layout(context=3),
    Layout(context=2, tensor=2),
    Layout(shard=2, context=2, shard_what="parameters"),
    Layout(pipeline=2, stage_layers=(3, 1), schedule="gpipe"),
    Layout(pipeline=2, stage_layers=(3, 1), recompute="full"),
    Layout(pipeline=2, stage_layers=(3, 1), schedule="zero-bubble", recompute="selective"),
    Layout(pipeline=3, stage_layers=(1, 2, 1)),
    Layout(pipeline=4, stage_layers=(1, 1, 1, 1), schedule="zero-bubble"),
    Layout(pipeline=2, stage_layers=_VIRTUAL, schedule="interleaved"),
    Layout(pipeline=2, stage_layers=(1, 1, 1, 1, 1, 1), schedule="interleaved", recompute="full"),
    Layout(pipeline=2, stage_layers=_VIRTUAL, schedule="interleaved", shard=2),
    Layout(pipeline=2, stage_layers=_VIRTUAL, schedule="interleaved", replicate=2),
    Layout(pipeline=2, stage_layers=_VIRTUAL, schedule="interleaved", tensor=2),
    Layout(pipeline=2, stage_layers=_CUT, schedule="zero-bubble", replicate=2),
    Layout(pipeline=2, stage_layers=_CUT, shard=2),
    Layout(pipeline=2, stage_layers=_CUT, shard=2, shard_what="parameters"),
    Layout(pipeline=2, stage_layers=_CUT, tensor=2),
    Layout(pipeline=2, stage_layers=_CUT, context=2, schedule="zero-bubble"),
    Layout(pipeline=2, stage_layers=_CUT, shard=2, tensor=2),
    Layout(pipeline=2, stage_layers=_CUT, context=2, tensor=2, schedule="gpipe"),
)
SHARED_OUT = (Layout(replicate=2, expert=2), Layout(replicate=2, expert=2, pipeline=2, stage_layers=_CUT))


def test_plait_computes_what_the_papers_write_down() -> None:
    assert by_hand(SHAPE)["losses"][:, 1].tolist() == sorted(by_hand(SHAPE)["losses"][:, 1].tolist(), reverse=True)
    assert max(all_errors()) < 1e-10


@pytest.mark.parametrize("patch", MUTANTS, ids=lambda patch: patch.stem)
def test_a_mutant_of_objectives_is_caught(patch: Path, call_mutant: CallMutant) -> None:
    assert call_mutant(patch, "error_of_objectives") > 1e-4


@pytest.mark.parametrize("name", few_fast(EVERY_DAY, "context"))
def test_objectives_are_what_one_process_computes(name: str, workers: ForkedWorkers) -> None:
    check(*EVERY_DAY[name], workers)


def cases() -> list[tuple[str, Layout]]:
    return covering(by_turns(LONG, KINDS, 3))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), cases(), ids=str)
def test_any_mix_computes_what_one_process_computes(kind: str, layout: Layout, workers: ForkedWorkers) -> None:
    check(kind, layout, workers)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), list(product(("deepseek", "every loss"), SHARED_OUT)), ids=str)
def test_experts_may_be_shared_out(kind: str, layout: Layout, workers: ForkedWorkers) -> None:
    check(kind, layout, workers)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(3, 1), (1, 4)], ids=str)
def test_shares_may_be_unequal(shares: tuple[int, int], workers: ForkedWorkers) -> None:
    check("tied", Layout(replicate=2), workers, shares)
    check("ahead", Layout(replicate=2, pipeline=2, stage_layers=(1, 2)), workers, shares)


def check(kind: str, layout: Layout, workers: ForkedWorkers, shares: tuple[int, ...] = ()) -> None:
    plan = shrunk_plan(CONFIG, KINDS[kind], layout, shares)
    check_layout(
        plan.placement.layout, plan.job.shape, sequence=plan.job.sequence, batch_sequences=plan.job.batch_sequences
    )
    assert plan.job.shape.objectives.weights
    verdict = check_gradients(CONFIG, plan, workers)
    assert verdict.ok, "\n".join(f"{one}: {one.error:.1e}" for one in verdict.worst)
    compared = {(one.kind, one.name) for one in verdict.findings}
    assert compared >= set(product(("gradient", "sgd", "adamw"), weight_sizes(plan.job.shape)))
    assert compared >= set(product(("sgd", "adamw"), kept_values(plan.job.shape)))
    assert compared >= {("sums", "auxiliary"), ("sums", "loss"), ("sums", "evaluation")}
