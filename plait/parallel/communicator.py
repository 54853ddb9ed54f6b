"""Collectives over the ranks of a job as training uses them, and their equivalents for a single process; importing this
imports no torch.distributed."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Communicator(Protocol):
    """A process group as training uses it: blocking collectives over all its ranks; calling it is an all-reduce."""

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


class OneProcessCommunicator:
    """A group of one process: every sum is already global."""

    index = 0
    size = 1

    def __call__(self, values: Tensor) -> Tensor:
        return values

    def largest(self, values: Tensor) -> Tensor:
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        return [values]


ONE_PROCESS = OneProcessCommunicator()
