"""Which parameters a step's backward passes reached on this worker, and whether each but once in a pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from plait.errors import PlaitError


class Arrivals:
    """Counts the gradients of a loss's parameters.

    Note [once in a pass]: a bucket's sum begins when the last of its gradients is there. A pass that adds to one twice
    (reentrant checkpoints run backward within backward) would add to it afterwards. So sums begin early only from the
    second pass on, and never where a pass added to a weight twice.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.once = False
        """Whether every gradient came but once in all passes so far, of which there was one at least."""
        self._twice = False
        self._now: set[int] = set()
        self._step: set[int] = set()
        self._count = len(parameters)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._arrived(number))
            for number, parameter in enumerate(parameters)
        ]

    def release(self) -> None:
        """Count no more."""
        for handle in self._handles:
            handle.remove()

    def open(self) -> None:
        """A new step begins."""
        self._step = set()
        self.next_pass()

    def next_pass(self) -> None:
        """A new pass of backward begins."""
        self._now = set()

    def reached(self) -> Tensor:
        """1 for every parameter with a gradient from this step, else 0; float64. Ends the step."""
        self.once = not self._twice
        found = torch.zeros(self._count, dtype=torch.float64)
        found[sorted(self._step)] = 1
        return found

    def _arrived(self, number: int) -> None:
        if number in self._now:
            self._twice = True
            if self.once:
                raise PlaitError(
                    "a weight got gradients twice in one backward, whose sums had begun; checkpoint without reentrance "
                    "(use_reentrant=False), from the first step on"
                )
        self._now.add(number)
        self._step.add(number)
