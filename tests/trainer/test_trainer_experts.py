"""A step's tokens by expert: the bias that follows from them, and the busiest expert."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait.model.gpt import GPT, mixtures_of
from plait.model.init import initialize
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape
from plait.parallel.sharded_model import unsharded
from plait.report.metrics import StepReport
from plait.trainer.experts.loads import ExpertLoads, largest_load
from plait.trainer.experts.replay import RoutingRecord, regret_of
from plait.trainer.experts.watch import ExpertUse, ExpertWatch

MIXTURE = MixtureShape(
    experts=4, experts_per_token=2, expert_ffn=8, dense_layers=1, balance=("bias",), balance_rate=0.25
)
SHAPE = ModelShape(
    layers=3, width=8, heads=1, kv_heads=1, head_width=8, ffn=16, vocabulary=32, sequence=8, mixture=MIXTURE
)
REPORT = StepReport(
    step=0, tokens=0, loss=2.0, grad_norm=1.0, lr=0.1, step_s=0.1, tokens_per_s=1.0, mfu=None, data_wait_s=0.0
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


def warned(*steps: tuple[int, ExpertUse]) -> list[str]:
    """The warnings of each of these steps, "" where there is none."""
    notes: list[str] = []
    watch = ExpertWatch(notes.append)
    found: list[str] = []
    for step, use in steps:
        watch.at_report(replace(REPORT, step=step), use)
        found.append("".join(notes))
        notes.clear()
    return found


def test_experts_without_tokens_are_told_of_once_and_again_when_they_are_more() -> None:
    def idle(number: int) -> ExpertUse:
        return ExpertUse(experts=8, idle=number, choices=0, dropped=0)

    found = warned(*((step, idle(n)) for step, n in ((5, 7), (20, 0), (21, 2), (22, 2), (23, 1), (24, 3))))
    assert [bool(one) for one in found] == [False, False, True, False, False, True]
    assert "3 of 8 experts" in found[-1]


def test_choices_without_room_are_told_of_once_and_again_when_they_are_twice_as_many() -> None:
    def full(number: int) -> ExpertUse:
        return ExpertUse(experts=8, idle=0, choices=1000, dropped=number)

    found = warned(*enumerate(map(full, (0, 30, 50, 60, 0, 100, 130))))
    assert [bool(one) for one in found] == [False, True, False, True, False, False, True]
    assert "30 of 1000 choices of experts (3.0%) found their expert full" in found[1]


def test_counts_of_a_mixture_with_a_capacity_end_with_what_was_dropped() -> None:
    loads = loads_of(replace(SHAPE, mixture=replace(MIXTURE, capacity=1.0)))
    loads.own[1].meter.add(torch.tensor([1.0, 2, 3, 4, 7], dtype=torch.float64))
    loads.own[2].meter.add(torch.tensor([5.0, 5, 0, 0, 1], dtype=torch.float64))
    counts = loads.take(LIKE)
    assert loads.table(counts).tolist() == [[1, 2, 3, 4], [5, 5, 0, 0]]
    assert loads.dropped(counts) == 8
    assert loads_of(SHAPE).dropped(torch.zeros(8)) is None


def replayed(shape: ModelShape, weights: int, path: Path, replay: bool) -> tuple[torch.Tensor, RoutingRecord]:
    """What a model of the seed `weights` makes of two rows, tokens 0 to 15 of a run, and where they went."""
    model = GPT(shape).double()
    initialize(model, weights)
    record = RoutingRecord(mixtures_of(model), path if replay else None)
    tokens_bt = torch.arange(16).view(2, 8)
    with torch.no_grad():
        return model(tokens_bt, numbers_n=torch.arange(16)), record


def test_tokens_go_where_they_went_in_another_run(tmp_path: Path) -> None:
    path = tmp_path / "routing.safetensors"
    first, record = replayed(SHAPE, 1, path, replay=False)
    record.save(path)
    same, record = replayed(SHAPE, 1, path, replay=True)
    assert torch.equal(first, same) and all(regret == 0 for regret in record.regret.values())
    _, record = replayed(SHAPE, 2, path, replay=True)
    assert all(regret > 1e-3 for regret in record.regret.values()), "other weights would have chosen otherwise"


def test_tokens_of_no_sample_choose_for_themselves(tmp_path: Path) -> None:
    path = tmp_path / "routing.safetensors"
    _, record = replayed(SHAPE, 1, path, replay=False)
    record.save(path)
    model = GPT(SHAPE).double()
    initialize(model, 2)
    record = RoutingRecord(mixtures_of(model), path)
    with torch.no_grad():
        free = model(torch.arange(16).view(2, 8), numbers_n=-torch.arange(1, 17))
    assert all(regret == 0 for regret in record.regret.values())
    for one in mixtures_of(model).values():
        one.router.choose = None
    with torch.no_grad():
        assert torch.equal(free, model(torch.arange(16).view(2, 8)))


def test_regret_is_the_distance_of_scores_rank_by_rank_or_of_groups() -> None:
    choice_ne = torch.tensor([[0.9, 0.5, 0.4, 0.8]])
    plain = replace(MIXTURE, balance=())
    assert regret_of(choice_ne, torch.tensor([[3, 0]]), plain) == 0
    assert regret_of(choice_ne, torch.tensor([[0, 1]]), plain) == pytest.approx(0.3)
    grouped = replace(plain, groups=2, groups_chosen=1)  # 1.4 against 1.2
    assert regret_of(choice_ne, torch.tensor([[0, 1]]), grouped) == 0
    assert regret_of(choice_ne, torch.tensor([[3, 2]]), grouped) == pytest.approx(0.2)


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
