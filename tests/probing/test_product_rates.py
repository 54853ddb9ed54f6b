"""Products are measured in each arithmetic: one that is slow, or inexact, is seen to be so and is not chosen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plait.machines.measured import Arithmetic, ProductRates
from plait.model.shape import ModelShape
from plait.planner.derive.arithmetic import choose_backend
from plait.probing.products import ArithmeticUnit, arithmetic_units, computes, measure_product_rates
from plait.probing.request import ProbedModel
from plait.probing.timing import ProcessorClock, SingleRank, TimingSetup

MODEL = ProbedModel(
    shape=ModelShape(layers=2, width=128, heads=4, kv_heads=4, head_width=32, ffn=256, vocabulary=512, sequence=64),
    sequence=64,
    sequences=2,
)
BENCH = TimingSetup(device=torch.device("cpu"), clock=ProcessorClock(share=1.0), lockstep=SingleRank())


class OtherProducts(TorchDispatchMode):
    """A library whose products are computed by a function of one's own."""

    def __init__(self, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.multiply = multiply

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            return self.multiply(*args)
        return func(*args, **(kwargs or {}))


def in_pieces(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product one column after the other: as exact as float32 is, and very slow."""
    return torch.stack([left @ column for column in right.unbind(1)], dim=1)


def rounded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of factors with 8 bits, which takes no time to speak of beside a product of columns."""
    return torch.matmul(left.bfloat16().float(), right.bfloat16().float())


def unit(select: Callable[[], AbstractContextManager[object]]) -> ArithmeticUnit:
    return ArithmeticUnit(select=select, dtype=torch.float32)


PLAIN, SLOW, INEXACT = unit(nullcontext), unit(lambda: OtherProducts(in_pieces)), unit(lambda: OtherProducts(rounded))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measured(**units: ArithmeticUnit) -> ProductRates:
    rates = measure_product_rates(MODEL, units, BENCH, seconds=0.0)  # type: ignore[arg-type]
    return ProductRates(machine="one", workers=1, library="MKL", rates=rates)


@pytest.mark.parametrize(
    ("default", "onednn", "choice"),
    [(SLOW, PLAIN, "onednn"), (PLAIN, SLOW, "default"), (SLOW, INEXACT, "default"), (PLAIN, INEXACT, "default")],
)
def test_a_library_made_slow_or_inexact_flips_the_choice(
    default: ArithmeticUnit, onednn: ArithmeticUnit, choice: str
) -> None:
    backend, reason = choose_backend("auto", measured(default=default, onednn=onednn))
    assert backend == choice, reason
    assert ("less exact" in reason) == (onednn is INEXACT)


def test_a_hopeless_arithmetic_is_not_measured_in_full_and_keeps_its_proportion() -> None:
    multiplied: set[tuple[torch.Size, torch.Size]] = set()

    def recorded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        multiplied.add((left.shape, right.shape))
        return in_pieces(left, right)

    found = measured(default=PLAIN, bf16=unit(lambda: OtherProducts(recorded)))
    assert found.gain("bf16") < 0.25 and len(multiplied) == 1
    assert found.gain("onednn") == 0.0


def refusing(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("could not create a primitive")


def test_an_arithmetic_that_fails_or_computes_nonsense_is_not_there() -> None:
    wrong = unit(lambda: OtherProducts(lambda left, right: torch.zeros(left.shape[0], right.shape[1])))
    assert computes(PLAIN) and not computes(unit(lambda: OtherProducts(refusing))) and not computes(wrong)


def test_this_processor_has_float32_products_and_errors_of_float32() -> None:
    rates = measure_product_rates(MODEL, arithmetic_units(), BENCH, seconds=0.0)
    default: Arithmetic = "default"
    assert rates[default].error < 2e-6 and rates[default].error_ratio == 1.0 and rates[default].flops > 0
    assert rates["bf16"].error > 100 * rates[default].error
    values = ProductRates(machine="one", workers=1, library="MKL", rates=rates).to_values()
    assert ProductRates.from_values(values).rates == rates


@pytest.mark.parametrize(
    "change",
    [{"rates": {}}, {"workers": -5}, {"flops": 0.0}, {"flops": -1.0}, {"flops": 8e307}, {"error": -1.0}, {"x": 5}],
    ids=str,
)
def test_rates_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    """They may come from another host."""
    rate = {"flops": 1e11, "error": 1e-7, "error_ratio": 1.0}
    whole = {"machine": "a", "workers": 2, "library": "MKL", "rates": {"default": rate}}
    assert ProductRates.from_values(whole).rates["default"].flops == 1e11
    given = whole | {"rates": {"default": rate | change}} if change.keys() <= rate.keys() else whole | change
    with pytest.raises(ValueError):
        ProductRates.from_values(given)
