"""Why a spread program does not compute what one process does: the likely cause, and the layer where it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait.custom.cutting import BatchCut
from plait.custom.exact_norm.batch_norm import convert_batch_norm
from plait.custom.group import Workers
from plait.custom.program import Program
from plait.custom.stepping.additive import check_additive
from plait.custom.verifying.observed import LayerCall
from plait.custom.verifying.outcome import Outcome
from plait.custom.verifying.remarks import CONVERT_ADVICE, local_norms, names_text
from plait.errors import PlaitError
from plait.proof import Finding

EQUAL = 1e-9
"""Sums in float64 that differ by less than this share are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedProof:
    """A program whose workers and one process do not compute the same: both outcomes, and what differs."""

    program: Program
    """A copy in float64 that may be changed."""
    alone: Outcome
    spread: Outcome
    findings: Sequence[Finding]
    batch: Any
    """The whole batch, or this worker's part of it where that cannot be joined."""
    cut: BatchCut | None


def find_causes(proof: FailedProof, workers: Workers, rerun: Callable[[Program], bool | None]) -> tuple[str, ...]:
    """Sentences, the likeliest cause first, the last one naming the first layer that differs.

    `rerun` tells whether a changed program passes, None where that cannot be tried. Every worker must call it; blocks.
    """
    norms = local_norms(proof.program)
    found = [
        _loss_cause(proof),
        _random_cause(proof.alone),
        _norm_cause(proof.program, norms, rerun),
        _buffer_cause(norms, proof.findings),
        _narrow_cause(proof.alone),
    ]
    return (*(cause for cause in found if cause), _first_difference(proof, workers))


def _loss_cause(proof: FailedProof) -> str:
    """The explanation if a step shows that losses are not sums."""
    for index in range(len(proof.program.losses)) if proof.program.additive == "yes" else ():
        try:
            check_additive(proof.program, index, proof.batch, proof.cut)
        except PlaitError as error:
            return str(error)
    return ""


def _random_cause(alone: Outcome) -> str:
    if not alone.seen.random_layers:
        return ""
    layers = list(dict.fromkeys(alone.seen.random_layers))
    return (
        f"{names_text(layers)} draws random numbers in the forward pass, other ones on each worker; draw them with the "
        "data to compare gradients"
    )


def _norm_cause(program: Program, norms: Sequence[str], rerun: Callable[[Program], bool | None]) -> str:
    if not norms:
        return ""
    for model in program.models:
        convert_batch_norm(model)
    after = {True: " (with it the gradients are equal here)", False: " (other causes remain)", None: ""}[rerun(program)]
    return (
        f"{names_text(norms)}: BatchNorm over each worker's local batch, where one process sees the whole batch; "
        f"{CONVERT_ADVICE}{after}"
    )


def _buffer_cause(norms: Sequence[str], findings: Sequence[Finding]) -> str:
    named = {f"{norm}.{buffer}" for norm in norms for buffer in ("running_mean", "running_var")}
    changed = [one.name for one in findings if one.kind == "buffer" and not one.passes and one.name not in named]
    if not changed:
        return ""
    return (
        f"the buffer {names_text(changed)} is changed in the forward pass by each worker from its own samples, so "
        "that the workers drift apart; sum what it is made of with plait.all_reduce"
    )


def _narrow_cause(alone: Outcome) -> str:
    narrow = [*dict.fromkeys(call.layer for call in alone.seen.calls if not call.float64), *alone.narrow_losses]
    if not narrow:
        return ""
    return f"{names_text(narrow)} computes in less than float64, which hides what is compared here"


def _first_difference(proof: FailedProof, workers: Workers) -> str:
    """The first layer, in the order of the forward pass, whose output differs; else the worst gradient."""
    call = _first_call(proof, workers)
    worst = next(one for one in proof.findings if not one.passes)
    if call is None:
        return f"all layers put out the same; {worst} differs by {worst.error:.0e}"
    layer = f"{call.layer or 'the model'} ({call.kind})"
    return f"the first layer whose output differs is {layer}; {worst} differs by {worst.error:.0e}"


def _first_call(proof: FailedProof, workers: Workers) -> LayerCall | None:
    """Compares sums over all samples, so it needs no order of samples; calls that do not answer each other are left."""
    alone, spread = proof.alone.seen.calls, proof.spread.seen.calls
    repeats = len(spread) // max(len(alone), 1)
    counts = workers.sums.gather(torch.tensor([len(spread)]))
    unlike = len({int(one) for one in counts}) > 1 or not alone or repeats * len(alone) != len(spread)
    if unlike or (repeats > 1 and len(proof.program.losses) > 1):
        return None
    totals = torch.tensor([[c.numbers, c.total, c.absolute] for c in spread], dtype=torch.float64).view(repeats, -1, 3)
    summed = workers.sums(totals.sum(0))
    copies = workers.size * repeats
    for call, (numbers, total, absolute) in zip(alone, summed.tolist(), strict=True):
        times = copies if numbers == copies * call.numbers and numbers != call.numbers else 1
        if numbers != times * call.numbers:
            continue
        if not _near(total, times * call.total, absolute) or not _near(absolute, times * call.absolute, absolute):
            return call
    return None


def _near(found: float, wanted: float, scale: float) -> bool:
    """Whether two sums in float64 are equal but for rounding."""
    return abs(found - wanted) <= EQUAL * max(scale, 1e-30)
