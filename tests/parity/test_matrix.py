"""Every mix of strands computes what one plain process computes, for every family of models."""

from __future__ import annotations

from itertools import product

import pytest

from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.small_model import shrunk_plan
from plait.layout import Layout, conflict_sentence
from plait.model.shape import weight_sizes
from plait.model.weights import kept_values
from plait.planner.search.validity import check_layout, check_shares
from plait.recipe.load import parse_config
from plait.recipe.schema import RunConfig
from plait.workers import ForkedWorkers
from tests.matrix import few_fast
from tests.parity.cases import EACH_KIND, EVERY_DAY, FAMILIES, LONG, NOT_EVERYWHERE, UNEQUAL, UNEQUAL_LONG, pairs

CONFIG = parse_config({"data": {"files": "none"}, "run": {"name": "matrix"}})
SGD = parse_config({"data": {"files": "none"}, "run": {"name": "matrix"}, "optimizer": {"kind": "sgd", "lr": 0.1}})


@pytest.mark.parametrize("name", few_fast(EVERY_DAY, *EACH_KIND))
def test_layout_computes_what_one_process_computes(name: str, workers: ForkedWorkers) -> None:
    family, layout = EVERY_DAY[name]
    check(family, layout, workers)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_DAY)
def test_sgd_computes_what_one_process_computes(name: str, workers: ForkedWorkers) -> None:
    family, layout = EVERY_DAY[name]
    check(family, layout, workers, config=SGD)


@pytest.mark.parametrize("name", few_fast(UNEQUAL, "shard parameters"))
def test_unequal_shares_compute_what_one_process_computes(name: str, workers: ForkedWorkers) -> None:
    family, layout, shares = UNEQUAL[name]
    check(family, layout, workers, shares)


def described(value: Layout | tuple[int, ...] | str) -> str:
    if not isinstance(value, Layout):
        return str(value)
    how = [value.shard_what] * (value.shard > 1) + [value.schedule] * (value.pipeline > 1) + [value.recompute]
    return f"{value}, {' '.join(how)}"


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "family"), pairs(), ids=described)
def test_any_mix_computes_what_one_process_computes(layout: Layout, family: str, workers: ForkedWorkers) -> None:
    check(family, layout, workers)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "shares"), UNEQUAL_LONG, ids=described)
def test_any_mix_with_unequal_shares_does(layout: Layout, shares: tuple[int, ...], workers: ForkedWorkers) -> None:
    check("gpt2", layout, workers, shares)


def check(
    family: str, layout: Layout, workers: ForkedWorkers, shares: tuple[int, ...] = (), config: RunConfig = CONFIG
) -> None:
    plan = shrunk_plan(config, {**FAMILIES, **NOT_EVERYWHERE}[family], layout, shares)
    check_layout(
        plan.placement.layout, plan.job.shape, sequence=plan.job.sequence, batch_sequences=plan.job.batch_sequences
    )
    check_shares(plan.placement.shares, plan.placement.layout, plan.job.batch_sequences)
    assert len(set(plan.sequences_per_replica)) > 1 or layout.data_parallel_degree == 1
    verdict = check_gradients(config, plan, workers)
    assert verdict.ok, "\n".join(f"{one}: {one.error:.1e}" for one in verdict.worst)
    compared = {(one.kind, one.name) for one in verdict.findings}
    own = "momentum" if plan.job.optimizer.kind == "sgd" else "adamw"
    weights = product(("gradient", "sgd", own), weight_sizes(plan.job.shape))
    kept = product(("sgd", own), kept_values(plan.job.shape))
    assert compared == {*weights, *kept, *(("sums", name) for name in ("norm", "loss", "evaluation"))}


def test_there_are_enough_layouts_and_all_are_allowed() -> None:
    assert len(EVERY_DAY) >= 12 and len(set(LONG)) >= 40
    assert {family for _, family in pairs()} == set(FAMILIES)
    assert not any(conflict_sentence(layout) for layout in LONG)
    assert max(layout.world_size for layout in LONG) == 8
