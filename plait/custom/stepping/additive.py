"""Whether a person's loss is what it promised: a sum over examples, so that halves of a batch add up to the whole."""

from __future__ import annotations

from typing import Any

import torch

from plait.custom.cutting import BatchCut, batch_part, batch_size
from plait.custom.program import Program
from plait.custom.stepping.evaluate import evaluation_mode
from plait.errors import PlaitError

EXAMPLES = 4
"""Examples that are looked at: enough for two halves of two, cheap beside a step."""
TOLERANCE = 1e-3
"""Relative: float32 and autocast round, and a mean is off by a factor of two."""


def examples_to_check(batch: Any, cut: BatchCut | None) -> int:
    """How many of a batch's examples `check_additive` can look at; 0 where the batch cannot be cut."""
    try:
        return min(EXAMPLES, batch_size(batch, cut))
    except PlaitError:
        return 0


def check_additive(program: Program, index: int, batch: Any, cut: BatchCut | None) -> None:
    """Raise PlaitError where two halves of the batch's first examples, two at least, do not add up to the whole.

    Models are in their evaluation mode meanwhile, so that neither dropout nor batch norms disturb; where a model cannot
    be run so, or its loss is random all the same (noise of a GAN), nothing is found. Runs the models four times.
    """
    size = examples_to_check(batch, cut)
    edges = [(0, size), (0, size // 2), (size // 2, size), (0, size)]
    sums = _sums(program, index, [batch_part(batch, first, end, cut) for first, end in edges])
    if sums is None or abs(sums[0][0] - sums[3][0]) > TOLERANCE * abs(sums[0][0]):
        return
    (whole, count), (first, count_first), (second, count_second), _ = sums
    fixed = "return the sum of the losses (reduction='sum') and their count"
    allowed = TOLERANCE * max(abs(whole), abs(first) + abs(second), 1e-12)
    if abs(whole - first - second) > allowed:
        if abs(2 * whole - first - second) <= 2 * allowed:
            raise PlaitError(
                f"loss_sum returns a mean: the losses of two halves of a batch add up to twice that of all; {fixed}"
            )
        if abs(whole * count - first * count_first - second * count_second) <= allowed * max(1.0, count):
            raise PlaitError(
                f"loss_sum returns a mean: it is not the sum of the losses of two halves of a batch; {fixed}"
            )
        raise PlaitError(
            f"the losses of two halves of a batch add up to {first + second:.6g}, that of all is {whole:.6g}: examples "
            "depend on each other (a contrastive loss, a norm over the batch), so a batch cannot be shared; "
            f"{fixed} for examples by themselves"
        )
    if abs(count - count_first - count_second) > 1e-6 * max(count, 1.0):
        raise PlaitError(
            f"the counts of two halves of a batch add up to {count_first + count_second:g}, that of all is {count:g}; "
            "return how many losses were summed, not a constant"
        )


def _sums(program: Program, index: int, parts: list[Any]) -> list[tuple[float, float]] | None:
    """The loss and count of each part without gradients; None where the models cannot be run so."""
    try:
        with torch.no_grad(), evaluation_mode(program):
            found = []
            for number, part in enumerate(parts):
                torch.manual_seed(program.seed + number)  # so that the whole differs from itself where it is random
                total, count = program.loss_sum(index, part)
                found.append((float(total), float(count)))
            return found
    except PlaitError:
        raise
    except Exception:
        return None  # a model may have another output in its evaluation mode; the step itself will tell
