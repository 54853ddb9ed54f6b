"""What a worker's processor was measured to reach with a model's matrix products, by library and precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Literal

from plait.checked_json import typed_value

Arithmetic = Literal["default", "onednn", "bf16"]
"""float32 products by torch's default library or by oneDNN, and products of bfloat16 numbers."""
_MOST_FLOPS = 1e18
"""No processor is near it: what says more was made up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRate:
    """Speed and error of a model's matrix products on one worker in one arithmetic."""

    flops: float
    """FLOP/s over the products of a training micro-batch, an evaluated sequence and a ragged one."""
    error: float
    """Largest relative error against float64, in the Frobenius norm."""
    error_ratio: float
    """Largest ratio of an error to that of the default library, on the same numbers."""

    def __post_init__(self) -> None:
        if not (1 <= self.flops <= _MOST_FLOPS and 0 <= self.error < inf and 0 <= self.error_ratio < inf):
            raise ValueError("no processor multiplies at such a rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRates:
    """The rates of one worker; an arithmetic that is not there has none."""

    machine: str
    """Digest of the worker's machine."""
    workers: int
    """How many such workers fill the machine's cores."""
    library: str
    """What people call the default library: MKL on x86."""
    rates: Mapping[Arithmetic, ProductRate]

    def __post_init__(self) -> None:
        if self.workers < 1 or "default" not in self.rates:
            raise ValueError("a worker has a default library, and at least one fills a machine")

    def gain(self, arithmetic: Arithmetic, over: Arithmetic = "default") -> float:
        """How many times as fast one arithmetic is as another; 0 where it is not there."""
        return self.rates[arithmetic].flops / self.rates[over].flops if arithmetic in self.rates else 0.0

    def to_values(self) -> dict[str, Any]:
        """The rates as JSON values."""
        return asdict(self)

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> ProductRates:
        """The rates that a worker sent; raises ValueError for anything else."""
        return typed_value(ProductRates, values)
