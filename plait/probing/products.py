"""Measures a model's matrix products in each arithmetic that a processor has: how fast, and how far from float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.checked_json import parse_object, typed_value
from plait.launch.values.job import RankContext
from plait.machines.machine import core_share, detect_cpu_machine, usable_cores
from plait.machines.measured import Arithmetic, ProductRate, ProductRates
from plait.model.matmul import default_library_name, has_onednn, matmul_library
from plait.parallel.mesh import open_store
from plait.probing.request import ProbedModel, layer_products
from plait.probing.timing import SingleRank, TimingSetup, processor_clock, time_in_rounds

MOST_FLOPS = 1e9
"""FLOPs of the largest product that is measured, a few milliseconds: of larger ones as many rows as these are, but
LEAST_ROWS; further rows cost about the same each."""
LEAST_ROWS = 128
COMPARED_ROWS, COMPARED_MATRICES = 64, 4
"""Rows of a product, or products of a batch of them, that are compared with float64's, which takes longer than all
else."""
HOPELESS = 4.0
"""An arithmetic that is this many times slower on one product is slower on all."""
LEAST_ERROR = 1e-8
"""Errors below count as this one: a product may be exact by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticUnit:
    """One way in which products are computed: what selects it, and the numbers that are multiplied."""

    select: Callable[[], AbstractContextManager[object]]
    dtype: torch.dtype


def arithmetic_units() -> dict[Arithmetic, ArithmeticUnit]:
    """The arithmetics of this process's torch and processor; one that does not run is not there."""
    found: dict[Arithmetic, ArithmeticUnit] = {
        "default": ArithmeticUnit(select=partial(matmul_library, "default"), dtype=torch.float32)
    }
    bf16 = ArithmeticUnit(select=nullcontext, dtype=torch.bfloat16)
    if computes(bf16):
        found["bf16"] = bf16
    onednn = ArithmeticUnit(select=partial(matmul_library, "onednn"), dtype=torch.float32)
    if has_onednn() and computes(onednn):
        found["onednn"] = onednn
    return found


def computes(unit: ArithmeticUnit) -> bool:
    """Whether a product can be computed in a unit."""
    two = torch.ones(16, 16, dtype=unit.dtype)
    try:
        with unit.select():
            return bool(torch.mm(two, two).float().sum() == 16**3)
    except RuntimeError:
        return False


class TimedWork(Protocol):
    """A piece of a step that is timed in each unit."""

    @property
    def times(self) -> float:
        """How often it occurs."""
        ...

    @property
    def flops(self) -> float:
        """FLOPs of all its occurrences."""
        ...

    def run(self, unit: ArithmeticUnit) -> Callable[[], object]:
        """A function that computes it once in a unit."""
        ...

    def errors(self, units: Mapping[Arithmetic, ArithmeticUnit]) -> dict[Arithmetic, float]:
        """Relative error in each unit against float64's, in the Frobenius norm."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """One product of a step, its factors in float32 ([rows, inner] and [inner, columns], or a batch of them [matrices,
    …]), and how often it occurs."""

    left: Tensor
    right: Tensor
    times: float

    @property
    def flops(self) -> float:
        return 2.0 * self.times * prod(self.left.shape) * self.right.shape[-1]

    def run(self, unit: ArithmeticUnit) -> Callable[[], Tensor]:
        """A function that computes the product in a unit."""
        left, right = self.left.to(unit.dtype), self.right.to(unit.dtype)

        def multiply() -> Tensor:
            with unit.select():
                return self._multiply(left, right)

        return multiply

    def errors(self, units: Mapping[Arithmetic, ArithmeticUnit]) -> dict[Arithmetic, float]:
        """Errors of the product's first rows, or of a batch's first products."""
        batched = self.left.dim() == 3
        few = COMPARED_MATRICES if batched else COMPARED_ROWS
        exact = self._multiply(self.left[:few].double(), (self.right[:few] if batched else self.right).double())
        return {name: relative_error(self.run(unit)()[:few], exact) for name, unit in units.items()}

    def _multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.bmm(left, right) if left.dim() == 3 else torch.mm(left, right)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """The Frobenius norm of the difference over that of the exact tensor, LEAST_ERROR at least."""
    return max(LEAST_ERROR, float((found - exact).norm() / exact.norm()))


def measure_product_rates(
    model: ProbedModel, units: Mapping[Arithmetic, ArithmeticUnit], bench: TimingSetup, *, seconds: float
) -> dict[Arithmetic, ProductRate]:
    """Time a model's products in all units, in rounds, and compare their results with float64's.

    `model` has the sequences of one micro-batch.
    """
    products = list(_products_of(model))
    smallest = min(products, key=lambda product: product.flops / product.times)
    return measure_work(products, units, bench, seconds=seconds, first=smallest)


def measure_work(
    products: Sequence[TimedWork],
    units: Mapping[Arithmetic, ArithmeticUnit],
    bench: TimingSetup,
    *,
    seconds: float,
    first: TimedWork,
) -> dict[Arithmetic, ProductRate]:
    """Time pieces of work in all units, in rounds, and compare their results with float64's.

    A unit that is far slower than the default on the `first` of them, as where a processor only emulates bf16, is not
    measured on the others: its rate is the default's in that proportion.
    """
    trial = _rates([first], units, bench, seconds=0.0)
    usual: dict[Arithmetic, ArithmeticUnit] = {
        name: unit for name, unit in units.items() if trial[name].flops * HOPELESS > trial["default"].flops
    }
    found = _rates(products, usual, bench, seconds=seconds)
    scale = found["default"].flops / trial["default"].flops
    slow: dict[Arithmetic, ProductRate] = {
        name: replace(trial[name], flops=trial[name].flops * scale) for name in units if name not in usual
    }
    return found | slow


def _rates(
    products: Sequence[TimedWork], units: Mapping[Arithmetic, ArithmeticUnit], bench: TimingSetup, *, seconds: float
) -> dict[Arithmetic, ProductRate]:
    timed = {(name, index): product.run(unit) for index, product in enumerate(products) for name, unit in units.items()}
    timings = time_in_rounds(timed, bench, seconds=seconds)
    errors = [product.errors(units) for product in products]
    flops = sum(product.flops for product in products)
    return {
        name: ProductRate(
            flops=flops / sum(one.times * timings[name, index].seconds for index, one in enumerate(products)),
            error=max(one[name] for one in errors),
            error_ratio=max(one[name] / one["default"] for one in errors),
        )
        for name in units
    }


def _products_of(model: ProbedModel) -> Iterator[MatrixProduct]:
    """The products of a training micro-batch forward and backward, and of the head. For the widest layer also the
    product of a single sequence forward, as in an evaluation, and both ways that of an odd number of tokens, as the
    ends of documents and of shares leave it."""
    layer = layer_products(model)
    for sizes in dict.fromkeys(layer):
        yield from _linear(sizes, layer.count(sizes) * model.shape.layers)
    _, inner, columns = max(layer, key=prod)
    single = replace(model, sequences=1)
    yield from _linear((single.tokens, inner, columns), model.shape.layers)[:1]
    yield from _linear((max(1, 5 * model.sequence // 8) | 1, inner, columns), model.shape.layers)
    yield from _linear((model.tokens, model.shape.width, model.shape.vocabulary), 1)


def _linear(sizes: tuple[int, int, int], times: float) -> Sequence[MatrixProduct]:
    """A linear layer's product and the gradients of its input and of its weight, as autograd multiplies them."""
    rows, inner, columns = sizes
    most = max(LEAST_ROWS, int(MOST_FLOPS / (2 * inner * columns)))
    if rows > most:
        kept = most - (most - rows) % 2  # an odd number stays odd
        rows, times = kept, times * rows / kept
    x, weight, grad = (torch.randn(two) for two in ((rows, inner), (columns, inner), (rows, columns)))
    factors = ((x, weight.t()), (grad, weight), (grad.t(), x))
    return [MatrixProduct(left=left, right=right, times=times) for left, right in factors]


# The ranks that measure a model's matrix products on the processors of a run; rank 0 sends the rates of all.


MEASURED_S = 0.5
RANK_TIMEOUT = timedelta(minutes=5)
"""Time limit for another rank's rates."""


def run_products_rank(context: RankContext, argument: str) -> None:
    """Entry of each rank; `argument` is a ProbedModel's JSON. Rank 0 sends one "products" message: for each rank the
    values of its ProductRates."""
    torch.set_num_threads(context.threads)
    torch.set_flush_denormal(True)  # as training does
    torch.manual_seed(0)
    model = typed_value(ProbedModel, parse_object(argument))
    clock = processor_clock(core_share(context.local_world_size))
    bench = TimingSetup(device=torch.device("cpu"), clock=clock, lockstep=SingleRank())
    rates = measure_product_rates(model, arithmetic_units(), bench, seconds=MEASURED_S)
    own = ProductRates(
        machine=detect_cpu_machine().digest(),
        workers=max(context.local_world_size, usable_cores() // context.threads),
        library=default_library_name(),
        rates=rates,
    )
    values = own.to_values()
    if context.world_size == 1:
        context.send("products", ranks=[values])
        return
    store = open_store(context.rendezvous, context.rank, context.world_size)
    store.set_timeout(RANK_TIMEOUT)
    store.set(f"products/{context.rank}", json.dumps(values))
    if context.rank == 0:
        context.send("products", ranks=[_reported(store.get(f"products/{one}")) for one in range(context.world_size)])


def _reported(sent: bytes) -> dict[str, Any]:
    """Another rank's report, an object or nothing: the leader checks its values."""
    try:
        return parse_object(sent)
    except ValueError:
        return {}
