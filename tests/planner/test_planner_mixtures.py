"""Mixtures of experts in the plan: what is counted, what is priced, which copies may share out experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.errors import PlaitError
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape, parameter_count
from plait.model.weights import active_parameter_count, training_flops_per_token
from plait.planner.plan import Plan
from plait.planner.problem.model_words import mixture_reasons
from plait.planner.problem.workload import workload_of
from plait.recipe.schema import BalanceSection, DataSection, LayoutSection, ModelSection, RunConfig, TrainSection
from tests.planner.machines import LAPTOP, corpus, planned

SHAPE = ModelShape(
    layers=6, width=256, heads=4, kv_heads=2, head_width=64, ffn=512, vocabulary=512, sequence=128,
    mixture=MixtureShape(experts=16, experts_per_token=2, expert_ffn=192, shared_experts=1, dense_layers=1, every=2),
)  # fmt: skip


def test_a_workload_counts_what_the_model_has() -> None:
    w = workload_of(SHAPE, sequence=128, batch_sequences=8)
    assert (w.moe_layers, w.dense_layers, w.shared_ffn, w.expert_ranks) == (2, 4, 192, "copies")
    assert w.parameters == pytest.approx(parameter_count(SHAPE), rel=0.01)
    head = SHAPE.vocabulary * SHAPE.width
    assert w.active_parameters == pytest.approx(active_parameter_count(SHAPE) - head, rel=0.01)
    assert w.flops_per_token("full") == pytest.approx(training_flops_per_token(SHAPE, 128, "full"), rel=0.01)


def plan_with(**layout: int) -> Plan:
    config = RunConfig(
        data=DataSection(files="text.txt"),
        model=ModelSection(size="3M", experts=32),
        train=TrainSection(budget="20 steps", batch_tokens=8192),
        layout=LayoutSection(**layout),  # type: ignore[arg-type]
    )
    return planned(config, corpus(1_500_000, 1), LAPTOP)


def test_experts_that_copies_share_out_take_less_memory_of_each() -> None:
    whole, shared = plan_with(replicate=2), plan_with(replicate=2, expert=2)
    assert (whole.placement.layout.expert, shared.placement.layout.expert) == (1, 2)
    assert whole.forecast is not None and shared.forecast is not None
    mixture = shared.job.shape.mixture
    assert mixture is not None
    matrices = 3 * shared.job.shape.layers * mixture.experts * mixture.expert_ffn * shared.job.shape.width
    saved = whole.forecast.tensor_bytes - shared.forecast.tensor_bytes
    assert saved == pytest.approx(16 * matrices / 2, rel=0.3)  # weights, gradients and two moments


def test_of_experts_that_ranks_of_shard_share_out_each_keeps_a_part_and_splits_no_further() -> None:
    split, shared = plan_with(shard=2), plan_with(shard=2, expert=2)
    assert split.forecast is not None and shared.forecast is not None and shared.job.shape.mixture is not None
    matrices = 3 * shared.job.shape.layers * shared.job.shape.mixture.experts * shared.job.shape.mixture.expert_ffn
    saved = split.forecast.tensor_bytes - shared.forecast.tensor_bytes
    # Half of the weights and of the gradients; of the moments each rank keeps a half in either layout.
    assert saved == pytest.approx(8 * matrices * shared.job.shape.width / 2, rel=0.3)


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ({"replicate": 3, "expert": 3}, "layout.expert = 3 does not divide 32 experts"),
        ({"replicate": 2, "expert": 4}, "layout.expert = 4 does not divide the 2 workers of layout.replicate"),
        ({"replicate": 2, "shard": 3, "expert": 2}, "unlike numbers of the same experts"),
        ({"expert": 2}, "name layout.replicate, layout.shard or layout.context, too"),
    ],
)
def test_experts_that_cannot_be_shared_out_are_one_sentence(layout: dict[str, int], sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence):
        plan_with(**layout)


def test_shares_do_not_follow_times_that_nobody_knows() -> None:
    config = RunConfig(
        data=DataSection(files="text.txt"),
        model=ModelSection(size="3M", experts=32),
        layout=LayoutSection(replicate=2, expert=2),
        balance=BalanceSection(every="10 steps"),
    )
    with pytest.raises(PlaitError, match="they wait for each other"):
        planned(config, corpus(1_500_000, 1), LAPTOP)


def test_the_plan_says_what_a_token_meets_and_what_keeps_experts_busy() -> None:
    assert SHAPE.mixture is not None
    told = mixture_reasons(
        replace(SHAPE, mixture=replace(SHAPE.mixture, balance=("bias", "global"), balance_weights=(0.1,)))
    )
    assert "2 of 16 experts and 1 that all pass in 2 layers; no token is dropped" in told[0]
    assert "no pipeline changes that" in told[1] and "weight 0.1" in told[2] and "about a third more work" in told[3]
    assert mixture_reasons(replace(SHAPE, mixture=None)) == []
    limited = mixture_reasons(replace(SHAPE, mixture=replace(SHAPE.mixture, capacity=1.25)))
    assert "takes at most 1.25 × its even share, and the rest is dropped" in limited[0]
