"""How fast, and how exactly, each library computes the products that were recorded of a person's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.custom.arithmetic.recorded import MemoryOrder, RecordedAttention, RecordedProduct, WorkCounts, total_flops
from plait.machines.machine import detect_cpu_machine, usable_cores
from plait.machines.measured import Arithmetic, ProductRates
from plait.model.matmul import default_library_name
from plait.probing.products import (
    LEAST_ROWS,
    ArithmeticUnit,
    MatrixProduct,
    TimedWork,
    arithmetic_units,
    measure_work,
    relative_error,
)
from plait.probing.timing import SingleRank, TimingSetup, processor_clock

RECORDED_WORK_S = 0.3
MOST_PIECE_FLOPS = 3e8
"""FLOPs of a piece of work that is measured, a few milliseconds: of a larger one a part, whose rate is about the
same."""
MOST_PIECES, ENOUGH = 10, 0.95
"""The pieces with the most work are measured: this many at most, or those that make up so much of it."""

Units = Mapping[Arithmetic, ArithmeticUnit]


def measure_recorded(counts: WorkCounts, units: Units | None = None, bench: TimingSetup | None = None) -> ProductRates:
    """Time the products of a step of this worker by both libraries, and compare them with float64's: under a second.

    Processor time counts where a worker has one thread, so that what other programs take does not.
    """
    found: Units = {name: unit for name, unit in (units or arithmetic_units()).items() if name != "bf16"}
    work = timed_work(counts)  # the most comes first, and stands for the rest where a library is hopeless
    rates = measure_work(work, found, bench or _bench(), seconds=RECORDED_WORK_S, first=work[0])
    return ProductRates(
        machine=detect_cpu_machine().digest(),
        workers=max(1, usable_cores() // torch.get_num_threads()),
        library=default_library_name(),
        rates=rates,
    )


def timed_work(counts: WorkCounts) -> list[TimedWork]:
    """The products that represent a step: those with the most work, with random factors, and how often each occurs."""
    numbers = torch.Generator().manual_seed(0)  # not the program's own
    wanted, found, held = ENOUGH * total_flops(counts), list[TimedWork](), 0.0
    for work, times in sorted(counts.items(), key=lambda pair: pair[0].flops * pair[1], reverse=True):
        make = _attention if isinstance(work, RecordedAttention) else _product
        found.append(make(work, float(times), numbers))  # type: ignore[operator, arg-type]
        held += work.flops * times
        if held >= wanted or len(found) == MOST_PIECES:
            break
    return found


def _bench() -> TimingSetup:
    return TimingSetup(device=torch.device("cpu"), clock=processor_clock(share=1.0), lockstep=SingleRank())


def _product(one: RecordedProduct, times: float, numbers: torch.Generator) -> MatrixProduct:
    """Of a product that is too large: fewer matrices, then fewer of its most numerous rows, columns or inner numbers,
    an odd number of which stays odd."""
    part = one
    if part.flops > MOST_PIECE_FLOPS and one.matrices > 1:
        part = replace(one, matrices=max(1, int(one.matrices * MOST_PIECE_FLOPS / one.flops)))
    if part.flops > MOST_PIECE_FLOPS:
        sizes = {"rows": part.rows, "inner": part.inner, "columns": part.columns}
        longest = max(sizes, key=lambda name: sizes[name])
        size = sizes[longest]
        fewer = min(size, max(LEAST_ROWS, int(size * MOST_PIECE_FLOPS / part.flops)))
        part = replace(part, **{longest: fewer - (size - fewer) % 2})  # pyright: ignore[reportArgumentType]
    left = _matrix(part.matrices, part.rows, part.inner, part.left, numbers)
    right = _matrix(part.matrices, part.inner, part.columns, part.right, numbers)
    return MatrixProduct(left=left, right=right, times=times * one.flops / part.flops)


def _matrix(matrices: int, rows: int, columns: int, order: MemoryOrder, numbers: torch.Generator) -> Tensor:
    batch = (matrices,) if matrices else ()
    if order == "rows":
        return torch.randn(*batch, rows, columns, generator=numbers)
    return torch.randn(*batch, columns, rows, generator=numbers).mT


def _attention(one: RecordedAttention, times: float, numbers: torch.Generator) -> AttentionPass:
    part = replace(one, batch=max(1, min(one.batch, int(one.batch * MOST_PIECE_FLOPS / one.flops))))
    return AttentionPass(shape=part, times=times * one.flops / part.flops, numbers=numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPass:
    """torch's attention forward and backward, on random numbers."""

    shape: RecordedAttention
    times: float
    numbers: torch.Generator

    @property
    def flops(self) -> float:
        return self.times * self.shape.flops

    def run(self, unit: ArithmeticUnit) -> Callable[[], object]:
        """A function that computes gradients in a unit."""
        one = self.shape
        q, k, v = self._inputs(unit.dtype)
        back, mask = torch.ones_like(q), self._mask(unit.dtype)

        def attend() -> object:
            with unit.select(), torch.enable_grad():
                mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=one.causal)
                return torch.autograd.grad(mixed, (q, k, v), back)

        return attend

    def errors(self, units: Units) -> dict[Arithmetic, float]:
        """Errors of the forward products; backward computes products of the same kinds."""
        inputs, mask = self._inputs(torch.float32), self._mask(torch.float32)
        wide = [one.detach().double() for one in inputs]
        found: dict[Arithmetic, float] = {}
        with torch.no_grad():
            exact = F.scaled_dot_product_attention(
                wide[0],
                wide[1],
                wide[2],
                attn_mask=None if mask is None else mask.double(),
                is_causal=self.shape.causal,
            )
            for name, unit in units.items():
                with unit.select():
                    mixed = F.scaled_dot_product_attention(*inputs, attn_mask=mask, is_causal=self.shape.causal)
                found[name] = relative_error(mixed, exact)
        return found

    def _inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        one = self.shape
        lengths = (one.queries, one.keys, one.keys)
        q, k, v = (torch.randn(one.batch, one.heads, rows, one.width, generator=self.numbers) for rows in lengths)
        return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), v.to(dtype).requires_grad_()

    def _mask(self, dtype: torch.dtype) -> Tensor | None:
        return torch.zeros(self.shape.queries, self.shape.keys, dtype=dtype) if self.shape.masked else None
