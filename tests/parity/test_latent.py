"""Latent attention in every mix of strands: gradients, weights, biases and counts of one plain process."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.small_model import shrunk_plan
from plait.layout import Layout
from plait.model.parts.latent_attention import LatentAttentionShape
from plait.model.parts.objectives import ObjectivesShape
from plait.model.shape import ModelShape, weight_sizes
from plait.planner.search.validity import check_layout
from plait.recipe.schema import DataSection, RunConfig
from plait.workers import ForkedWorkers
from tests.matrix import few_fast
from tests.parity.cases import LLAMA, YARN, by_turns, covering
from tests.parity.test_mixtures import DEEPSEEK, EVERY_LOSS

CONFIG = RunConfig(data=DataSection(files="nothing.txt"))
LATENT = LatentAttentionShape(key_value_rank=16, query_rank=24, rope_width=4, value_width=8)
DENSE = replace(LLAMA, kv_heads=8, latent=LATENT)
KINDS: dict[str, ModelShape] = {
    "dense": DENSE,
    "deepseek": replace(DENSE, mixture=DEEPSEEK, objectives=ObjectivesShape(ahead=1)),
    "every loss": replace(DENSE, latent=replace(LATENT, query_rank=0), mixture=EVERY_LOSS, tied=True),
    "wide values": replace(DENSE, latent=replace(LATENT, value_width=20), windows=(0, 16) * 4),
    "stretched": replace(DENSE, latent=replace(LATENT, mscale_all_dim=0.8), rope=YARN, tied=True),
}
EVERY_DAY: dict[str, tuple[str, Layout]] = {
    "tensor": ("stretched", Layout(tensor=2)),
    "context × expert": ("deepseek", Layout(context=2, expert=2)),
}
_CUT, _VIRTUAL = (2, 2), (1, 2, 2, 1)
LONG: tuple[Layout, ...] = (
    Layout(replicate=3, recompute="full"),
    Layout(shard=2),
    Layout(shard=2, shard_what="parameters", recompute="selective"),
    Layout(replicate=2, shard=2, shard_what="parameters"),
    Layout(tensor=2, recompute="full"),
    Layout(tensor=2, recompute="selective"),
    Layout(tensor=4),
    Layout(context=2, recompute="selective"),
    Layout(context=3),
    Layout(context=2, tensor=2),
    Layout(shard=2, tensor=2, shard_what="parameters"),
    Layout(shard=2, context=2, shard_what="parameters"),
    Layout(replicate=2, tensor=2, recompute="full"),
    Layout(pipeline=2, stage_layers=(3, 1), schedule="gpipe"),
    Layout(pipeline=2, stage_layers=_CUT, schedule="zero-bubble"),
    Layout(pipeline=2, stage_layers=_CUT, schedule="zero-bubble", tensor=2),
    Layout(pipeline=3, stage_layers=(1, 2, 1)),
    Layout(pipeline=2, stage_layers=_VIRTUAL, schedule="interleaved", replicate=2),
    Layout(pipeline=2, stage_layers=_VIRTUAL, schedule="interleaved", tensor=2),
    Layout(pipeline=2, stage_layers=_CUT, context=2, tensor=2),
    Layout(pipeline=2, stage_layers=_CUT, shard=2, tensor=2),
)
SHARED_OUT: tuple[Layout, ...] = (
    Layout(replicate=2, expert=2),
    Layout(shard=2, expert=2, recompute="full"),
    Layout(replicate=2, expert=2, tensor=2),
    Layout(context=2, expert=2, tensor=2),
    Layout(replicate=2, expert=2, pipeline=2, stage_layers=_CUT, schedule="zero-bubble"),
    Layout(shard=2, context=2, expert=4, shard_what="parameters", recompute="selective"),
)


def check(kind: str, layout: Layout, workers: ForkedWorkers, shares: tuple[int, ...] = ()) -> None:
    plan = shrunk_plan(CONFIG, KINDS[kind], layout, shares)
    check_layout(
        plan.placement.layout, plan.job.shape, sequence=plan.job.sequence, batch_sequences=plan.job.batch_sequences
    )
    latent, large = plan.job.shape.latent, KINDS[kind].latent
    assert latent is not None and large is not None
    assert (latent.query_rank > 0) == (large.query_rank > 0)
    verdict = check_gradients(CONFIG, plan, workers)
    assert verdict.ok, "\n".join(f"{one}: {one.error:.1e}" for one in verdict.worst)
    compared = {(one.kind, one.name) for one in verdict.findings}
    assert set(product(("gradient", "sgd", "adamw"), weight_sizes(plan.job.shape))) <= compared


@pytest.mark.parametrize("name", few_fast(EVERY_DAY, "tensor"))
def test_latent_attention_is_what_one_process_computes(name: str, workers: ForkedWorkers) -> None:
    check(*EVERY_DAY[name], workers)


def cases() -> list[tuple[str, Layout]]:
    return covering(by_turns(LONG, KINDS, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), cases(), ids=str)
def test_any_mix_does(kind: str, layout: Layout, workers: ForkedWorkers) -> None:
    check(kind, layout, workers)


@pytest.mark.slow
@pytest.mark.parametrize("layout", SHARED_OUT, ids=str)
def test_any_mix_with_experts_shared_out_does(layout: Layout, workers: ForkedWorkers) -> None:
    check("deepseek", layout, workers)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(3, 1), (1, 4)], ids=str)
def test_shares_may_be_unequal(shares: tuple[int, int], workers: ForkedWorkers) -> None:
    check("dense", Layout(replicate=2), workers, shares)
    check("every loss", Layout(shard=2, expert=2), workers, shares)
