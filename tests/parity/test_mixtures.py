"""Mixtures of experts in every mix of strands: gradients, weights, biases and counts of one plain process."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.small_model import shrunk_plan
from plait.layout import Layout, conflict_sentence
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape, weight_sizes
from plait.model.weights import kept_values
from plait.parallel.expert import expert_groups
from plait.partition.boxes import ranks_splitting
from plait.planner.search.validity import check_layout
from plait.recipe.schema import DataSection, RunConfig
from plait.workers import ForkedWorkers
from tests.matrix import few_fast
from tests.parity.cases import LLAMA, covering

CONFIG = RunConfig(data=DataSection(files="nothing.txt"))
DEEPSEEK = MixtureShape(
    experts=8, experts_per_token=2, expert_ffn=64, shared_experts=1, dense_layers=1, groups=4, groups_chosen=2,
    router="sigmoid", scale=2.5, balance=("bias", "sequence"), balance_weights=(1e-4,),
)  # fmt: skip
EVERY_LOSS = MixtureShape(
    experts=8, experts_per_token=2, expert_ffn=64, every=2, balance=("bias", "sequence", "global", "switch"),
    balance_weights=(1e-4, 0.01, 0.01), z_weight=0.001,
)  # fmt: skip
KINDS: dict[str, ModelShape] = {
    "deepseek": replace(LLAMA, mixture=DEEPSEEK),
    "every loss": replace(LLAMA, mixture=EVERY_LOSS, tied=True),
    "full": replace(LLAMA, mixture=replace(EVERY_LOSS, shared_experts=1, capacity=1.25)),
    "biases": replace(
        LLAMA,
        attention_sinks=True,
        bias="attention",
        activation="clamped swiglu",
        windows=(16, 0) * 4,
        mixture=replace(EVERY_LOSS, every=1, bias=True, groups=4, groups_chosen=2, group_score="best"),
    ),
    "olmoe": replace(
        LLAMA, mixture=replace(EVERY_LOSS, every=1, normalize=False), qk_norm=True, qk_norm_width="all heads"
    ),
}

EVERY_DAY: dict[str, tuple[str, Layout]] = {
    "replicate": ("every loss", Layout(replicate=2, recompute="full")),
    "pipeline": ("deepseek", Layout(pipeline=2, stage_layers=(2, 2), schedule="zero-bubble")),
    "expert": ("every loss", Layout(shard=2, expert=2)),
    "capacity": ("full", Layout(context=2)),
    "biases": ("biases", Layout(tensor=2)),
}
LONG: tuple[Layout, ...] = (
    Layout(replicate=3),
    Layout(shard=2),
    Layout(shard=3, shard_what="parameters", recompute="full"),
    Layout(replicate=2, shard=2, shard_what="parameters"),
    Layout(tensor=2, recompute="selective"),
    Layout(tensor=4),
    Layout(context=2, recompute="full"),
    Layout(context=3),
    Layout(context=2, tensor=2),
    Layout(shard=2, context=2, shard_what="parameters"),
    Layout(replicate=2, tensor=2, recompute="full"),
    Layout(pipeline=2, stage_layers=(3, 1), schedule="gpipe"),
    Layout(pipeline=2, stage_layers=(1, 2, 2, 1), schedule="interleaved"),
    Layout(pipeline=2, stage_layers=(2, 2), schedule="zero-bubble", recompute="full", replicate=2),
    Layout(pipeline=2, stage_layers=(2, 2), shard=2, shard_what="parameters"),
    Layout(pipeline=3, stage_layers=(1, 2, 1)),
    Layout(pipeline=2, stage_layers=(2, 3), tensor=2),
    Layout(pipeline=2, stage_layers=(2, 2), context=2, schedule="zero-bubble"),
    Layout(shard=2, context=2, tensor=2),
    Layout(pipeline=2, stage_layers=(2, 2), shard=2, tensor=2),
)
_CUT = (2, 2)
SHARED_OUT: tuple[Layout, ...] = (
    Layout(replicate=2, expert=2, recompute="full"),
    Layout(replicate=3, expert=3),
    Layout(replicate=4, expert=2),
    Layout(replicate=4, expert=4, recompute="selective"),
    Layout(replicate=6, expert=3),
    Layout(replicate=6, expert=2),
    Layout(replicate=8, expert=4),
    Layout(replicate=8, expert=8),
    Layout(replicate=2, expert=2, tensor=2),
    Layout(replicate=4, expert=2, tensor=2, recompute="full"),
    Layout(replicate=2, expert=2, tensor=4),
    Layout(replicate=2, expert=2, context=2),
    Layout(replicate=3, expert=3, context=2, recompute="selective"),
    Layout(replicate=2, expert=2, context=2, tensor=2),
    Layout(replicate=2, expert=2, pipeline=2, stage_layers=_CUT),
    Layout(replicate=3, expert=3, pipeline=2, stage_layers=_CUT, schedule="gpipe"),
    Layout(replicate=2, expert=2, pipeline=2, stage_layers=_CUT, schedule="zero-bubble"),
    Layout(replicate=4, expert=2, pipeline=2, stage_layers=_CUT, schedule="zero-bubble", recompute="full"),
    Layout(replicate=2, expert=2, pipeline=2, stage_layers=(1, 2, 2, 1), schedule="interleaved"),
    Layout(replicate=2, expert=2, pipeline=2, stage_layers=_CUT, tensor=2),
    Layout(replicate=2, expert=2, pipeline=2, stage_layers=_CUT, context=2),
    Layout(shard=2, expert=2, recompute="full"),
    Layout(shard=4, expert=2),
    Layout(shard=3, expert=3),
    Layout(shard=6, expert=2, recompute="selective"),
    Layout(replicate=2, shard=2, expert=2),
    Layout(replicate=2, shard=2, expert=4),
    Layout(replicate=4, shard=2, expert=4),
    Layout(shard=2, expert=2, shard_what="parameters"),
    Layout(shard=4, expert=2, shard_what="parameters", recompute="full"),
    Layout(replicate=2, shard=2, expert=4, shard_what="parameters"),
    Layout(replicate=2, shard=4, expert=2, shard_what="parameters"),
    Layout(context=2, expert=2),
    Layout(context=3, expert=3, recompute="full"),
    Layout(context=4, expert=2),
    Layout(replicate=2, context=2, expert=4),
    Layout(shard=2, context=2, expert=2),
    Layout(shard=2, context=2, expert=4),
    Layout(shard=3, context=2, expert=3),
    Layout(shard=2, context=2, expert=2, shard_what="parameters"),
    Layout(shard=2, context=2, expert=4, shard_what="parameters", recompute="selective"),
    Layout(shard=2, expert=2, tensor=2),
    Layout(shard=2, expert=2, tensor=2, shard_what="parameters"),
    Layout(shard=2, context=2, expert=2, tensor=2),
    Layout(shard=2, expert=2, pipeline=2, stage_layers=_CUT, schedule="zero-bubble"),
    Layout(shard=2, expert=2, pipeline=2, stage_layers=_CUT, shard_what="parameters"),
    Layout(shard=4, expert=2, pipeline=2, stage_layers=(1, 2, 2, 1), schedule="interleaved"),
    Layout(context=2, expert=2, pipeline=2, stage_layers=_CUT, schedule="zero-bubble", recompute="full"),
)
"""With experts shared out among the ranks that see different tokens."""


@pytest.mark.parametrize("name", few_fast(EVERY_DAY, "expert"))
def test_a_mixture_computes_what_one_process_computes(name: str, workers: ForkedWorkers) -> None:
    check(*EVERY_DAY[name], workers)


def cases() -> list[tuple[str, Layout]]:
    return covering([(kind, layout) for layout, kind in product(LONG, KINDS) if kind != "olmoe" or layout.tensor == 1])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), cases(), ids=str)
def test_any_mix_does(kind: str, layout: Layout, workers: ForkedWorkers) -> None:
    check(kind, layout, workers)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "place"), list(zip(SHARED_OUT, range(len(SHARED_OUT)), strict=True)), ids=str)
def test_any_mix_with_experts_shared_out_does(layout: Layout, place: int, workers: ForkedWorkers) -> None:
    """With the bias and all auxiliary losses on; every second one with DeepSeek's groups, too, or with a capacity."""
    check("every loss", layout, workers)
    if place % 2:
        check(("deepseek", "full")[place % 4 // 2], layout, workers)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(3, 1), (1, 4)], ids=str)
def test_shares_may_be_unequal(shares: tuple[int, int], workers: ForkedWorkers) -> None:
    check("deepseek", Layout(replicate=2), workers, shares)
    check("every loss", Layout(replicate=2, expert=2), workers, shares)
    check("full", Layout(shard=2, expert=2), workers, shares)


def test_there_are_enough_layouts_and_all_are_allowed() -> None:
    assert len(set(SHARED_OUT)) >= 20 and {layout.world_size for layout in SHARED_OUT} >= {2, 3, 4, 6, 8}
    assert not any(conflict_sentence(layout) for layout in (*LONG, *SHARED_OUT))


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (
            Layout(replicate=2, expert=4),
            "layout.expert = 4 does not divide the 2 workers of layout.replicate × layout.shard",
        ),
        (Layout(shard=3, context=2, expert=4), "does not divide the 6 workers of .*; choose one of 1, 2, 3, 6"),
        (Layout(replicate=2, shard=6, expert=4), "would hold unlike numbers of the same experts"),
    ],
    ids=str,
)
def test_what_cannot_share_experts_out_is_refused(layout: Layout, sentence: str) -> None:
    assert re.search(sentence, str(conflict_sentence(layout)))


@pytest.mark.parametrize(
    "layout", [Layout(shard=6, context=2, expert=expert) for expert in (1, 2, 3, 4, 6, 12)], ids=str
)
def test_ranks_that_split_an_expert_hold_it_whole_between_them(layout: Layout) -> None:
    name = "layers.0.feedforward.experts.0.up.weight"
    for rank in range(layout.world_size):
        splitting = ranks_splitting(layout, name, rank)
        assert rank in splitting and len(splitting) == layout.expert_shards
        assert {layout.expert_index(one) for one in splitting} == {layout.expert_index(rank)}
    assert all(len(group) == layout.expert for group in expert_groups(layout))
    assert [rank for group in expert_groups(layout) for rank in group] == list(range(layout.world_size))


def check(kind: str, layout: Layout, workers: ForkedWorkers, shares: tuple[int, ...] = ()) -> None:
    plan = shrunk_plan(CONFIG, KINDS[kind], layout, shares)
    check_layout(
        plan.placement.layout, plan.job.shape, sequence=plan.job.sequence, batch_sequences=plan.job.batch_sequences
    )
    assert (
        plan.job.shape.mixture is not None and plan.job.shape.mixture.experts > plan.job.shape.mixture.experts_per_token
    )
    verdict = check_gradients(CONFIG, plan, workers)
    assert verdict.ok, "\n".join(f"{one}: {one.error:.1e}" for one in verdict.worst)
    compared = {(one.kind, one.name) for one in verdict.findings}
    weights = product(("gradient", "sgd", "adamw"), weight_sizes(plan.job.shape))
    biases = product(("sgd", "adamw"), kept_values(plan.job.shape))
    sums = {("sums", name) for name in ("norm", "loss", "evaluation")}
    layers = [layer for layer in range(plan.job.shape.layers) if plan.job.shape.mixture_of(layer)]
    routers = {("routing", f"layers.{layer}.feedforward.router.weight") for layer in layers}
    assert compared == {*weights, *biases, *sums, ("counts", "experts"), *routers}
