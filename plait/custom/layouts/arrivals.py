"""Whether a backward pass reaches each parameter but once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

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
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._arrived(number))
            for number, parameter in enumerate(parameters)
        ]

    def release(self) -> None:
        """Count no more."""
        for handle in self._handles:
            handle.remove()

    def next_pass(self) -> None:
        """A new pass of backward begins."""
        self._now = set()

    def end_step(self) -> None:
        """The step's last pass of backward has ended."""
        self.once = not self._twice

    def _arrived(self, number: int) -> None:
        if number in self._now:
            self._twice = True
            if self.once:
                raise PlaitError(
                    "a weight got gradients twice in one backward, whose sums had begun; checkpoint without reentrance "
                    "(use_reentrant=False), from the first step on"
                )
        self._now.add(number)
