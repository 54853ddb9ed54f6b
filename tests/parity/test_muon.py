"""Muon in every mix of strands: matrices are orthogonalized whole, and weights are those of one plain process."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.small_model import shrunk_plan
from plait.layout import Layout
from plait.model.shape import ModelShape, weight_sizes
from plait.partition.matrix_owners import CopiesCompute
from plait.planner.plan import Plan
from plait.recipe.load import parse_config
from plait.workers import ForkedWorkers
from tests.matrix import few_fast
from tests.parity import test_latent, test_mixtures
from tests.parity.cases import EVERY_DAY, FAMILIES, NOT_EVERYWHERE, UNEQUAL, UNEQUAL_LONG, pairs
from tests.parity.conftest import CallMutant
from tests.parity.test_matrix import described

CONFIG = parse_config({"data": {"files": "none"}, "run": {"name": "matrix"}, "optimizer": {"kind": "muon"}})
MUTANTS = Path(__file__).parent / "muon_mutants"

EXPERTS: dict[str, tuple[ModelShape, Layout]] = {
    "expert": (test_mixtures.KINDS["deepseek"], Layout(shard=2, expert=2)),
    "expert × parameters": (
        test_mixtures.KINDS["every loss"],
        Layout(shard=4, expert=2, shard_what="parameters", recompute="full"),
    ),
    "expert × tensor": (test_mixtures.KINDS["full"], Layout(replicate=2, expert=2, tensor=2)),
    "expert × pipeline": (
        test_mixtures.KINDS["deepseek"],
        Layout(replicate=2, expert=2, pipeline=2, stage_layers=(2, 2), schedule="zero-bubble"),
    ),
    "latent": (test_latent.KINDS["deepseek"], Layout(tensor=2)),
    "latent × parameters": (test_latent.KINDS["wide values"], Layout(replicate=2, shard=2, shard_what="parameters")),
    "prediction ahead": (test_latent.KINDS["deepseek"], Layout(pipeline=2, stage_layers=(2, 2), shard=2)),
}
"""Where experts, latent attention and prediction ahead bring matrices of their own."""

COPIES: tuple[Layout, ...] = (
    Layout(replicate=3),
    Layout(replicate=2, shard=2),
    Layout(replicate=2, shard=2, shard_what="parameters"),
    Layout(replicate=2, tensor=2),
    Layout(tensor=4),
    Layout(context=2),
    Layout(pipeline=2, stage_layers=(3, 5), replicate=2),
)
"""Layouts in which several ranks hold the same pieces, with "multi-query" some of them more often than others."""

SHOWN_BY: dict[str, tuple[str, ...]] = {
    "pieces-orthogonalized-apart": ("layout.shard=2", "layout.shard_what=parameters"),
    "owners-keep-their-results": ("layout.replicate=2",),
    "scaled-by-the-piece": ("layout.shard=2", "layout.shard_what=parameters", "layout.tensor=2"),
    "pieces-in-another-order": ("layout.tensor=2",),
    "copies-without-momentum": ("layout.replicate=2",),
}
"""Each mutant, and a layout in which its bug matters."""


@pytest.mark.parametrize(
    "name", few_fast(EVERY_DAY, "replicate", "shard", "shard parameters", "tensor beyond kv heads", "shard × tensor")
)
def test_layout_computes_what_one_process_computes(name: str, workers: ForkedWorkers) -> None:
    family, layout = EVERY_DAY[name]
    check(shrunk_plan(CONFIG, {**FAMILIES, **NOT_EVERYWHERE}[family], layout), workers)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_shares_compute_what_one_process_computes(name: str, workers: ForkedWorkers) -> None:
    family, layout, shares = UNEQUAL[name]
    check(shrunk_plan(CONFIG, FAMILIES[family], layout, shares), workers)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "family"), pairs(), ids=described)
def test_any_mix_computes_what_one_process_computes(layout: Layout, family: str, workers: ForkedWorkers) -> None:
    check(shrunk_plan(CONFIG, {**FAMILIES, **NOT_EVERYWHERE}[family], layout), workers)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "shares"), UNEQUAL_LONG, ids=described)
def test_any_mix_with_unequal_shares_does(layout: Layout, shares: tuple[int, ...], workers: ForkedWorkers) -> None:
    check(shrunk_plan(CONFIG, FAMILIES["gpt2"], layout, shares), workers)


@pytest.mark.parametrize("name", few_fast(EXPERTS, "expert × parameters"))
def test_experts_compute_what_one_process_computes(name: str, workers: ForkedWorkers) -> None:
    shape, layout = EXPERTS[name]
    check(shrunk_plan(CONFIG, shape, layout), workers)


@pytest.mark.parametrize("layout", few_fast(COPIES, COPIES[1]), ids=described)
def test_copies_that_compute_for_themselves_compute_the_same(layout: Layout, workers: ForkedWorkers) -> None:
    plan = shrunk_plan(CONFIG, FAMILIES["multi-query"], layout)
    apart: CopiesCompute = "each for itself"
    check(replace(plan, placement=replace(plan.placement, copies_compute=apart)), workers)


def check(plan: Plan, workers: ForkedWorkers) -> None:
    verdict = check_gradients(CONFIG, plan, workers)
    assert verdict.ok, "\n".join(f"{one}: {one.error:.1e}" for one in verdict.worst)
    compared = {(one.kind, one.name) for one in verdict.findings}
    assert compared >= set(product(("gradient", "sgd", "muon"), weight_sizes(plan.job.shape)))


def test_every_mutant_has_its_layout() -> None:
    assert {path.stem for path in MUTANTS.glob("*.patch")} == set(SHOWN_BY)


@pytest.mark.parametrize("name", SHOWN_BY)
def test_a_mutant_is_caught(name: str, call_mutant: CallMutant) -> None:
    told = call_mutant(MUTANTS / f"{name}.patch", "verdict_of_muon", SHOWN_BY[name])
    assert not told["ok"] and told["max_param_rel_err"] > 1e-4


@pytest.mark.parametrize("asked", sorted(set(SHOWN_BY.values())), ids=" ".join)
def test_without_the_bugs_all_these_layouts_are_green(asked: tuple[str, ...], call_mutant: CallMutant) -> None:
    assert call_mutant(None, "verdict_of_muon", asked)["ok"]
