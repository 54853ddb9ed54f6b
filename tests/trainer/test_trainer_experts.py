"""A step's tokens by expert: the bias that follows from them, and the busiest expert."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from plait.layout import Layout
from plait.model.gpt import GPT, mixtures_of
from plait.model.init import initialize
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape
from plait.parallel.sharded_model import unsharded
from plait.trainer.experts.loads import ExpertLoads, largest_load
from plait.trainer.experts.watch import IdleWatch

MIXTURE = MixtureShape(
    experts=4, experts_per_token=2, expert_ffn=8, dense_layers=1, balance=("bias",), balance_rate=0.25
)
SHAPE = ModelShape(
    layers=3, width=8, heads=1, kv_heads=1, head_width=8, ffn=16, vocabulary=32, sequence=8, mixture=MIXTURE
)
LIKE = torch.zeros(1, dtype=torch.float64)


def loads_of(shape: ModelShape) -> ExpertLoads:
    model = GPT(shape)
    initialize(model, 1)
    return ExpertLoads(unsharded(model), shape)


def test_a_bias_moves_by_the_rate_towards_the_mean_and_by_the_sign_alone() -> None:
    loads = loads_of(SHAPE)
    table = torch.tensor([[40.0, 10, 15, 15], [20, 20, 20, 20]], dtype=torch.float64)
    loads.move_biases(table, torch.tensor(1.0))
    assert loads.own[1].router.balance.tolist() == [-0.25, 0.25, 0.25, 0.25]
    assert loads.own[2].router.balance.tolist() == [0.0] * 4
    loads.move_biases(table, torch.tensor(math.nan))  # the update was skipped
    assert loads.own[1].router.balance.tolist() == [-0.25, 0.25, 0.25, 0.25]


def test_without_the_bias_nothing_moves() -> None:
    loads = loads_of(replace(SHAPE, mixture=replace(MIXTURE, balance=())))
    loads.move_biases(torch.tensor([[40.0, 10, 15, 15], [20, 20, 20, 20]]), torch.tensor(1.0))
    assert not loads.own[1].router.balance.any()
    assert list(loads.kept(Layout(), 0)) == []


def test_counts_of_a_step_are_taken_once_in_the_order_of_layers() -> None:
    loads = loads_of(SHAPE)
    loads.own[2].meter.add(torch.tensor([1.0, 2, 3, 4], dtype=torch.float64))
    loads.own[2].meter.add(torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))
    assert loads.take(LIKE).tolist() == [0, 0, 0, 0, 2, 2, 3, 4]
    assert not loads.take(LIKE).any()


def test_the_busiest_expert_is_that_of_the_worst_layer() -> None:
    table = torch.tensor([[40.0, 10, 15, 15], [20, 20, 20, 20]])
    assert largest_load(table).item() == 2.0
    assert math.isnan(largest_load(torch.zeros(0, 0)).item())


def test_experts_without_tokens_are_told_of_once_and_again_when_they_are_more() -> None:
    watch = IdleWatch()
    told = [bool(watch.add(step, idle, 8)) for step, idle in ((5, 7), (20, 0), (21, 2), (22, 2), (23, 1), (24, 3))]
    assert told == [False, False, True, False, False, True]
    assert "3 of 8 experts" in IdleWatch().add(30, 3, 8)


def test_a_pass_without_gradients_counts_first_where_a_loss_needs_it() -> None:
    shape = replace(SHAPE, mixture=replace(MIXTURE, balance=("global",), balance_weights=(0.1,)))
    loads = loads_of(shape)
    model = GPT(shape)
    initialize(model, 1)
    loads = ExpertLoads(unsharded(model), shape)
    tokens_bt = torch.arange(16).view(2, 8)

    def run() -> None:
        with torch.no_grad():
            model(tokens_bt)

    loads.count_first(run, lambda own: 2 * own, LIKE)
    model(tokens_bt).sum().backward()
    counted = loads.table(loads.take(LIKE))
    for place, one in enumerate(mixtures_of(model).values()):
        assert one.step_counts_e is not None and torch.equal(one.step_counts_e, 2 * counted[place])
        assert counted[place].sum() == 2 * 16
