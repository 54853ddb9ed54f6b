"""One process's gradient follows from the ranks' own, and known mistakes are recognized by their factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from plait.checking.recorded import CheckedStep, MicroBatch, RankStep
from plait.checking.reference import EXACT, StepComparison, compare_step, named_factor, weights_of_loss
from plait.checking.watch.journal import sampled

COUNTS = ((5.0, 9.0), (20.0, 3.0))
"""Elements of two ranks' two micro-batches."""


def step_of(
    result: Callable[[list[list[Tensor]], int], Tensor], coefficient: float = 0.5, kind: str = "mean"
) -> CheckedStep:
    """Two ranks whose losses are means or sums times a coefficient; `result` makes a rank's gradient of all of them."""
    generator = torch.Generator().manual_seed(0)
    means = [[torch.randn(40, generator=generator, dtype=torch.float64) for _ in rank] for rank in COUNTS]
    micros, ranks = [], []
    for rank, counts in enumerate(COUNTS):
        tensors = {"gradient/0": result(means, rank)}
        for place, count in enumerate(counts):
            tensors[f"local/{place}/0"] = coefficient * means[rank][place]
            micros.append(
                MicroBatch(
                    rank=rank, number=place, place=place, site="train.py:9", loss=1.0, kind=kind,
                    coefficient=coefficient, units={"valid": count}, is_linear=True,
                )
            )  # fmt: skip
        about = {"name": "w", "shape": [40], "sharded": False, "dtype": "float64", "trained": True}
        ranks.append(RankStep(event={"parameters": [about], "site": "train.py:12"}, tensors=tensors))
    return CheckedStep(optimizer=0, step=0, ranks=ranks, micros=micros)


def by_elements(means: Sequence[Sequence[Tensor]]) -> Tensor:
    weighted = [
        count * one for counts, rank in zip(COUNTS, means, strict=True) for count, one in zip(counts, rank, strict=True)
    ]
    return torch.stack(weighted).sum(0) / sum(map(sum, COUNTS))


def relations(result: StepComparison) -> set[tuple[str, float]]:
    return {(one.relation, round(one.factor, 6)) for one in result.comparisons}


@pytest.mark.parametrize(
    ("result", "relation", "factor"),
    [
        (lambda means, rank: by_elements(means), "equal", 1.0),
        (lambda means, rank: 2 * by_elements(means), "scaled", 2.0),
        (lambda means, rank: torch.stack([*means[0], *means[1]]).mean(0), "mean of means", 0.25),
        (lambda means, rank: torch.stack(means[rank]).mean(0), "own only", 0.5),
    ],
)
def test_relations(result: Callable[[list[list[Tensor]], int], Tensor], relation: str, factor: float) -> None:
    assert relations(compare_step(step_of(result), tolerance=EXACT)) == {(relation, factor)}


def test_ranks_that_count_unequally() -> None:
    def uneven(means: list[list[Tensor]], rank: int) -> Tensor:
        parts = [sum(c * m for c, m in zip(COUNTS[one], means[one], strict=True)) / 37 for one in (0, 1)]
        return 3 * torch.as_tensor(parts[0]) + torch.as_tensor(parts[1])

    found = compare_step(step_of(uneven), tolerance=EXACT).comparisons
    assert {one.relation for one in found} == {"ranks uneven"}
    assert found[0].rank_factors == pytest.approx((3.0, 1.0))


def test_a_sum_that_the_program_divides_by_its_own_count_is_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """all_reduce without a division gives a constant's right sum, but twice a mean that is written as a sum."""
    monkeypatch.setitem(globals(), "COUNTS", ((4.0, 4.0), (4.0, 4.0)))

    def added(coefficient: float) -> StepComparison:
        step = step_of(lambda sums, rank: coefficient * torch.stack([*sums[0], *sums[1]]).sum(0), coefficient, "sum")
        return compare_step(step, tolerance=EXACT)

    assert relations(added(1 / 1000)) == {("equal", 1.0)}
    assert relations(added(1 / 8)) == {("scaled", 2.0)}  # of 4 elements and 2 micro-batches
    assert relations(added(1 / 4)) == {("scaled", 4.0)}  # and accumulation, too


def test_a_mean_that_the_program_maximizes_is_no_factor() -> None:
    step = step_of(lambda means, rank: -by_elements(means), coefficient=-1.0)
    assert relations(compare_step(step, tolerance=EXACT)) == {("equal", 1.0)}


def test_one_micro_batch_that_is_not_summed() -> None:
    def own_last(means: list[list[Tensor]], rank: int) -> Tensor:
        first = torch.stack([COUNTS[one][0] * means[one][0] for one in (0, 1)]).sum(0) / 37
        return first + 2 * COUNTS[rank][1] * means[rank][1] / 37

    step = step_of(own_last)
    for rank in step.ranks:  # a bias with few elements has the factors of the large weight
        rank.event["parameters"].append({**step.parameters[0], "name": "bias", "shape": [3]})
        assert isinstance(rank.tensors, dict)
        rank.tensors.update({f"{key[:-1]}1": one[:3] for key, one in rank.tensors.items() if key[-2:] == "/0"})
    found = compare_step(step, tolerance=EXACT).comparisons
    assert [one.relation for one in found] == ["micro-batches uneven"] * 4
    assert found[0].rank_factors == pytest.approx((1, 2, 1, 0), abs=1e-6)


def test_a_gradient_that_cancels_out_says_nothing() -> None:
    step = step_of(lambda means, rank: by_elements(means))
    about = {**step.parameters[0], "name": "bias"}
    for index, rank in enumerate(step.ranks):
        rank.event["parameters"].append(about)
        noise = torch.randn(40, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        assert isinstance(rank.tensors, dict)
        rank.tensors.update({"gradient/1": 1e-9 * noise, "local/0/1": -2e-9 * noise})
    assert relations(compare_step(step, tolerance=EXACT)) == {("equal", 1.0)}


def test_the_weight_of_a_loss_in_each_reading() -> None:
    step = step_of(lambda sums, rank: torch.stack([*sums[0], *sums[1]]).sum(0) / 2000, 1 / 1000, "sum")
    assert weights_of_loss(step, tolerance=EXACT)["as written"] == pytest.approx(1 / 2000)


def test_noise_fits_nothing() -> None:
    noise = torch.randn(40, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert relations(compare_step(step_of(lambda means, rank: noise), tolerance=EXACT)) == {("unknown", 1.0)}


def test_factors_by_name() -> None:
    assert named_factor(3.0, 3, 4) == "world size"
    assert named_factor(0.25, 3, 4) == "1 / accumulation"
    assert named_factor(0.9, 3, 4) == ""


def test_a_sparse_gradient_is_written_down_as_the_dense_one_that_it_stands_for() -> None:
    gradient = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    assert torch.equal(sampled(gradient.to_sparse()), sampled(gradient))
