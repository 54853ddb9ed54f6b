"""A pipeline of any cut and schedule gives one process' gradients; so does torch's own with the same stages."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plait.launch.values.job import Job
from plait.layout import Schedule
from plait.model.linear import Linear
from plait.parallel.pipeline import DeferredGradients, defer_in
from tests.parallel.pipeline_entries import Case, micros_of, plain_gradients
from tests.shared_ranks import RanksOf

Found = list[dict[str, Tensor]]
"""What each rank left."""
RunCases = Callable[[str, int, list[Case]], list[Found]]

CUTS = {(2, 1): (3, 1), (2, 2): (1, 2, 1, 1), (3, 1): (1, 2, 1), (3, 2): (1, 1, 2, 1, 1, 1),
        (4, 1): (2, 1, 1, 1), (4, 2): (1, 1, 1, 1, 1, 1, 1, 2)}  # fmt: skip


def cases_of(ranks: int) -> list[Case]:
    """All schedules, both families of models, few and many micro-batches, with and without documents."""
    everything = product(get_args(Schedule), (1, 2), (2, 5, 1) if ranks == 2 else (5, 2) if ranks == 3 else (5, 1))
    return [
        Case(
            schedule=schedule,
            stage_layers=CUTS[ranks, virtual],
            micros=micros,
            family="gpt2" if (micros + virtual) % 2 else "llama",
            documents=micros == 5,
            recompute={1: "none", 2: "full", 5: "selective"}[micros],
        )
        for schedule, virtual, micros in everything
    ]


@cache
def wanted_for(case: Case) -> dict[str, Tensor]:
    """One process' gradients, which no schedule changes."""
    return plain_gradients(case, micros_of(case))


@pytest.fixture(scope="module")
def run_cases(tmp_path_factory: pytest.TempPathFactory) -> RunCases:
    """Run an entry of pipeline_entries with these cases on so many ranks."""
    server = RanksOf("tests.parallel.pipeline_entries")

    def run(entry: str, ranks: int, cases: list[Case]) -> list[Found]:
        folder = tmp_path_factory.mktemp("pipeline")
        argument = json.dumps({"folder": str(folder), "cases": [asdict(case) for case in cases]})
        server.run(Job(entry=entry, argument=argument, world_size=ranks, threads=1), on_message=lambda _: None)
        paths = [[folder / f"case-{n}-rank-{r}.safetensors" for r in range(ranks)] for n in range(len(cases))]
        return [[load_file(path) for path in of_case] for of_case in paths]

    return run


def added(found: Found) -> dict[str, Tensor]:
    """Each gradient over all ranks: only a tied embedding is on two of them."""
    total: dict[str, Tensor] = {}
    for of_rank in found:
        for name, value in of_rank.items():
            total[name] = total[name] + value if name in total else value
    return total


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The oracle's measure: against the largest number of the tensor, or a millionth of the largest of all."""
    gradients = {name: value for name, value in wanted.items() if name.startswith("grad/")}
    assert gradients.keys() == {name for name in found if name.startswith("grad/")}
    floor = 1e-6 * max(float(value.abs().max()) for value in gradients.values())
    return max(
        float((found[name] - value).abs().max()) / max(float(value.abs().max()), floor)
        for name, value in gradients.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_schedule_and_cut_gives_one_process_gradients(run_cases: RunCases, ranks: int) -> None:
    cases = cases_of(ranks)
    for case, found in zip(cases, run_cases("run_cases", ranks, cases), strict=True):
        wanted = wanted_for(replace(case, schedule="1f1b", recompute="none"))
        assert error(added(found), wanted) < 1e-10, case
        torch.testing.assert_close(found[-1]["totals"], wanted["totals"], rtol=1e-13, atol=0)
        torch.testing.assert_close(found[-1]["evaluated"], wanted["totals"], rtol=1e-13, atol=0)
        assert not any(each["totals"].any() or each["evaluated"].any() for each in found[:-1])


def test_torchs_own_pipeline_gives_the_same_gradients(run_cases: RunCases) -> None:
    cases = [
        Case(
            schedule=schedule,
            stage_layers=CUTS[2, 2 if schedule in ("interleaved", "zero-bubble") else 1],
            micros=5,
        )
        for schedule in get_args(Schedule)
    ]
    for case, peer in zip(cases, run_cases("run_peer", 2, cases), strict=True):
        wanted = plain_gradients(case, micros_of(case)[:-1])  # the last is smaller, which torch does not take
        assert error(added(peer), wanted) < 1e-10, case


def test_bf16_is_close_whether_weight_gradients_are_put_off_or_not(run_cases: RunCases) -> None:
    cases = [
        Case(schedule=schedule, stage_layers=(2, 1), micros=3, family="gpt2", precision="bf16")
        for schedule in ("1f1b", "zero-bubble")
    ]
    whole, split = (added(found) for found in run_cases("run_cases", 2, cases))
    wanted = plain_gradients(cases[0], micros_of(cases[0]))
    for found in (whole, split):
        assert all(value.dtype == torch.float32 for name, value in found.items() if name.startswith("grad/"))
        norms = [torch.stack([v.double().norm() for n, v in each.items() if n.startswith("grad/")]).norm()
                 for each in (found, wanted)]  # fmt: skip
        assert float(norms[0]) == pytest.approx(float(norms[1]), rel=0.02)
    assert error(whole, wanted) > 1e-5 and error(split, whole) < 0.02


def test_a_put_off_product_is_the_plain_one() -> None:
    """Input and bias at once, the weight only when it is settled, added to what is there."""
    generator = torch.Generator().manual_seed(1)
    plain, put_off = (Linear(4, 3, bias=True).double() for _ in range(2))
    put_off.load_state_dict(plain.state_dict())
    deferred = DeferredGradients()
    defer_in(put_off, deferred.multiply)
    inputs = [torch.randn(2, 5, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    for key, x in enumerate(inputs):
        twin = x.clone().requires_grad_()
        plain(x.requires_grad_()).pow(2).sum().backward()
        deferred.collect(key)
        put_off(twin).pow(2).sum().backward()
        torch.testing.assert_close(twin.grad, x.grad, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(put_off.bias.grad, plain.bias.grad, rtol=1e-14, atol=0)
    assert put_off.weight.grad is None
    for key in (1, 0):
        deferred.settle(key)
    torch.testing.assert_close(put_off.weight.grad, plain.weight.grad, rtol=1e-13, atol=1e-14)
    with pytest.raises(KeyError):
        deferred.settle(0)


def test_micro_batches_of_these_tests_are_unequal() -> None:
    rows = [len(micro.inputs) for micro in micros_of(Case(schedule="1f1b", stage_layers=(1, 1), micros=3))]
    assert rows == [3, 3, 2]
