"""The library of a person's float32 products: recorded, measured, chosen by all workers, kept, and left alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.custom.arithmetic.library import ProductLibrary, RequestedLibrary
from plait.custom.arithmetic.measured import MOST_PIECE_FLOPS, Units, measure_recorded, timed_work
from plait.custom.arithmetic.recorded import (
    RecordedAttention,
    RecordedProduct,
    RecordedWork,
    WorkCounts,
    WorkRecorder,
    total_flops,
)
from plait.custom.group import Workers, alone
from plait.custom.program import Program
from plait.machines.machine import detect_cpu_machine
from plait.machines.measured import ProductRates
from plait.model.matmul import matmul_library, selected_matmul_library
from plait.planner.derive.arithmetic import choose_backend
from plait.probing.products import ArithmeticUnit
from plait.probing.timing import ProcessorClock, SingleRank, TimingSetup
from tests.commands.product_answers import ROUNDED, rates_of
from tests.planner.machines import SERVER
from tests.probing.test_product_rates import INEXACT, PLAIN, SLOW

HERE = detect_cpu_machine()
FAST, SLOWER = rates_of(HERE, {"onednn": 2.3}), rates_of(HERE, {"onednn": 0.5})
INPUTS, WEIGHT = torch.ones(700, 400), torch.ones(400, 2000)
"""Whose product is more than the least FLOPs that are worth a measurement."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where what was measured is kept; and torch's switches as they were."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    assert selected_matmul_library() == "default"


def product(rows: int, inner: int, columns: int, left: Any, right: Any, matrices: int = 0) -> RecordedProduct:
    return RecordedProduct(matrices=matrices, rows=rows, inner=inner, columns=columns, left=left, right=right)


def test_products_are_recorded_forward_and_backward_as_they_lie_in_memory() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    with WorkRecorder() as recorder:
        model(torch.ones(11, 5)).sum().backward()
        torch.bmm(torch.ones(2, 3, 4), torch.ones(2, 5, 4).mT)
        torch.mm(torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64))
    expected: dict[RecordedWork, int] = {
        product(11, 5, 7, "rows", "columns"): 1,
        product(11, 7, 3, "rows", "columns"): 1,
        product(3, 4, 5, "rows", "columns", matrices=2): 1,
    }
    assert expected.items() <= recorder.counts.items()
    # Of the first layer, whose input wants no gradient, the weight's; of the second both.
    assert sum(recorder.counts.values()) == 6 and len(recorder.counts) == 6
    assert total_flops(recorder.counts) == 2 * (2 * 11 * 5 * 7 + 3 * 11 * 7 * 3 + 2 * 3 * 4 * 5)


def test_attention_is_recorded_with_its_lengths() -> None:
    q, k = torch.ones(2, 3, 16, 8, requires_grad=True), torch.ones(2, 3, 32, 8)
    with WorkRecorder() as recorder:
        F.scaled_dot_product_attention(q, k, k).sum().backward()
    attention = RecordedAttention(batch=2, heads=3, queries=16, keys=32, width=8, causal=False, masked=False)
    assert recorder.counts[attention] == 1


COUNTS: dict[RecordedWork, int] = {
    product(64, 128, 96, "rows", "columns"): 4,
    product(96, 64, 128, "columns", "rows"): 4,
    RecordedAttention(batch=1, heads=2, queries=32, keys=32, width=16, causal=True, masked=False): 1,
}
BENCH = TimingSetup(device=torch.device("cpu"), clock=ProcessorClock(share=1.0), lockstep=SingleRank())


@pytest.mark.parametrize(
    ("default", "onednn", "choice"), [(SLOW, PLAIN, "onednn"), (PLAIN, SLOW, "default"), (SLOW, INEXACT, "default")]
)
def test_a_library_made_slow_or_inexact_flips_the_choice(
    default: ArithmeticUnit, onednn: ArithmeticUnit, choice: str
) -> None:
    units: Units = {"default": default, "onednn": onednn}
    backend, reason = choose_backend("auto", measure_recorded(COUNTS, units, BENCH))
    assert backend == choice, reason
    assert ("less exact" in reason) == (onednn is INEXACT)


def test_of_large_work_a_part_is_measured_that_counts_for_all() -> None:
    large: dict[RecordedWork, int] = {
        product(4001, 400, 2000, "rows", "columns"): 2,
        product(64, 64, 64, "rows", "rows", matrices=5000): 1,
        product(2, 2, 2, "rows", "rows"): 1,
    }
    made = timed_work(large)
    assert len(made) == 2, "what is next to nothing is not measured"
    assert sum(one.flops for one in made) == pytest.approx(total_flops(large), rel=1e-6)
    assert all(one.flops / one.times <= MOST_PIECE_FLOPS for one in made)


def program_of(model: nn.Module | None = None) -> Program:
    model = model or nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Program(models=(model,), optimizers=(optimizer,), losses=(lambda model, batch: batch,))


class Measured:
    """Described rates in place of measured ones, and how often they were asked for."""

    def __init__(self, rates: ProductRates) -> None:
        self.rates, self.asked = rates, 0

    def __call__(self, counts: WorkCounts) -> ProductRates:
        self.asked += 1
        assert total_flops(counts) > 0
        return self.rates


def library_of(
    measure: Callable[[WorkCounts], ProductRates],
    requested: RequestedLibrary = "measured",
    workers: Workers | None = None,
    model: nn.Module | None = None,
) -> ProductLibrary:
    return ProductLibrary(program_of(model), workers or alone(), requested, measure)


def used_in_steps(library: ProductLibrary, count: int, first: int = 0) -> list[str]:
    found = []
    for number in range(first, first + count):
        with library.step(number):
            torch.mm(INPUTS, WEIGHT)
            found.append(selected_matmul_library())
        assert selected_matmul_library() == "default"
    return found


def test_the_library_is_decided_after_the_second_step_and_used_in_steps_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    measure = Measured(FAST)
    library = library_of(measure)
    assert used_in_steps(library, 4) == ["default", "default", "onednn", "onednn"]
    with library.selected():
        assert selected_matmul_library() == "onednn"
    said = capsys.readouterr().out
    assert said.count("matrix products by oneDNN: 2.3 times as fast as") == 1 and measure.asked == 1
    again = Measured(SLOWER)  # not asked: rates of this machine and these products are kept
    assert used_in_steps(library_of(again), 3)[-1] == "onednn" and not again.asked


@pytest.mark.parametrize("rates", [SLOWER, rates_of(HERE, {"onednn": 8.0}, error=ROUNDED)], ids=["slow", "inexact"])
def test_one_that_is_slower_or_rounds_is_not_used(capsys: pytest.CaptureFixture[str], rates: ProductRates) -> None:
    assert set(used_in_steps(library_of(Measured(rates)), 3)) == {"default"}
    assert "matrix products by" in capsys.readouterr().out


def test_nothing_is_measured_where_it_is_not_asked_for_or_not_worth_it() -> None:
    measure = Measured(FAST)
    assert set(used_in_steps(library_of(measure, "default"), 3)) == {"default"}
    small = library_of(measure)
    for number in range(3):
        with small.step(number):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    compiled = nn.Linear(2, 2)
    compiled.compile()
    assert set(used_in_steps(library_of(measure, model=compiled), 3)) == {"default"}
    assert small.library == "default" and not measure.asked


def test_what_a_person_has_set_stays() -> None:
    measure = Measured(FAST)
    switch: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    library = library_of(measure)
    for number in range(3):
        with matmul_library("onednn"), library.step(number):  # as somebody's own choice
            torch.mm(INPUTS, WEIGHT)
            assert switch.fp32_precision == "bf16"
    assert library.library == "default" and not measure.asked
    taken = library_of(measure)
    assert used_in_steps(taken, 3)[-1] == "onednn"
    try:
        switch.fp32_precision = "ieee"
        with taken.step(3):
            assert switch.fp32_precision == "ieee"
    finally:
        switch.fp32_precision = "none"


class TwoWorkers:
    """Sums of two workers, of which the other one tells what is given here, one after the other."""

    index, size = 0, 2

    def __init__(self, *told: Any) -> None:
        self.told = [json.dumps(one).encode() for one in told]

    def __call__(self, values: Tensor) -> Tensor:
        raise AssertionError("nothing is added up")

    def largest(self, values: Tensor) -> Tensor:
        raise AssertionError("no maximum is asked for")

    def gather(self, values: Tensor) -> list[Tensor]:
        if values.dtype == torch.int64:
            return [values, torch.tensor([len(self.told[0])])]
        other = torch.zeros_like(values)
        text = self.told.pop(0)
        other[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return [values, other]


def two_workers(*told: Any) -> Workers:
    return Workers(rank=0, size=2, local_rank=0, device=torch.device("cpu"), sums=TwoWorkers(*told))


def test_unlike_hosts_may_take_unlike_libraries_which_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    slow = rates_of(SERVER, {"onednn": 0.5})
    before: Mapping[str, Any] = {"machine": SERVER.digest(), "flops": 2e9, "set": False, "rates": []}
    workers = two_workers(before, {"rates": [slow.to_values()]})
    library = library_of(Measured(FAST), workers=workers)
    assert used_in_steps(library, 3)[-1] == "onednn"
    assert library.saved() == [[HERE.digest(), "onednn"], [SERVER.digest(), "default"]]
    said = capsys.readouterr().out
    assert "matrix products by oneDNN" in said and "unlike hosts: matrix products by MKL" in said


def test_one_worker_whose_precision_is_set_keeps_all_from_it() -> None:
    measure = Measured(FAST)
    workers = two_workers({"machine": SERVER.digest(), "flops": 2e9, "set": True, "rates": []})
    assert set(used_in_steps(library_of(measure, workers=workers), 3)) == {"default"} and not measure.asked


def test_a_resumed_run_keeps_its_library_on_the_same_machine() -> None:
    library = library_of(Measured(FAST))
    assert library.saved() == [], "undecided"
    used_in_steps(library, 2)
    saved = json.loads(json.dumps(library.saved()))
    measure = Measured(SLOWER)
    same = library_of(measure)
    same.resume(saved)
    assert used_in_steps(same, 2, first=2) == ["onednn", "onednn"] and not measure.asked
    elsewhere = library_of(measure)
    elsewhere.resume([["0123456789abcdef", "onednn"]])
    assert used_in_steps(elsewhere, 1, first=2) == ["default"], "found out again"
    named = library_of(measure, "default")
    named.resume(saved)
    assert named.library == "default"


def loss_sum(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def test_a_program_measures_once_and_resumes_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever this processor's choice is."""

    def build(**options: Any) -> plait.SpreadRun:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(300, 600), nn.ReLU(), nn.Linear(600, 300), nn.ReLU(), nn.Linear(300, 10))
        return plait.spread(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum=loss_sum, **options)

    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(1024, 300, generator=generator), torch.randint(10, (1024,), generator=generator)
    run = build()
    for step in range(4):
        if step == 3:
            run.save(tmp_path / "kept")
        run.step(batch)
    assert capsys.readouterr().out.count("matrix products by") == 1
    assert list((tmp_path / ".plait" / "timings").iterdir())
    other = build()
    other.resume(tmp_path / "kept")
    other.step(batch)
    assert all(torch.equal(one, other.weights()[name]) for name, one in run.weights().items())
    capsys.readouterr()
    named = build(precision="float32")
    for _ in range(3):
        named.step(batch)
    assert "matrix products" not in capsys.readouterr().out
