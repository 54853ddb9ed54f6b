"""Sums over the ranks of a job, and those of a single process; importing this imports no torch.distributed."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Sums(Protocol):
    """Sums over all ranks of a job, and this rank's place among them."""

    index: int
    size: int

    def __call__(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place. Every rank must call it; blocks."""
        ...

    def largest(self, values: Tensor) -> Tensor:
        """The element-wise maximum over all ranks, in place. Every rank must call it; blocks."""
        ...

    def gather(self, values: Tensor) -> list[Tensor]:
        """Each rank's values, in rank order. Every rank must call it; blocks."""
        ...


class OneProcessSums:
    """One process: every sum is already global."""

    index = 0
    size = 1

    def __call__(self, values: Tensor) -> Tensor:
        return values

    def largest(self, values: Tensor) -> Tensor:
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        return [values]


ONE_PROCESS = OneProcessSums()
