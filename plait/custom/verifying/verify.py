"""`run.verify`: a person's own model in float64, once spread over the workers and once in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.custom.cutting import BatchCut, batch_parts
from plait.custom.exact_norm.batch_norm import GlobalBatchNorm
from plait.custom.group import Workers
from plait.custom.layouts.choose import DEFAULT_CHOICES
from plait.custom.layouts.copies import copy_program, with_own_optimizers
from plait.custom.layouts.description import CustomLayout, LayoutChoices
from plait.custom.program import Program
from plait.custom.structure import mapped, widened
from plait.custom.verifying.causes import FailedProof, find_causes
from plait.custom.verifying.outcome import Outcome, run_alone, run_spread, updated_alone, updated_spread
from plait.custom.verifying.remarks import remarks_of
from plait.custom.verifying.shares import gather_shares, join_shares
from plait.errors import PlaitError
from plait.layout import Layout
from plait.proof import FLOAT32_TOLERANCES, FLOAT64_TOLERANCES, Finding, Tolerances, Verdict

BUFFER_TOLERANCE = 1e-9
UPDATE_TOLERANCE = 1e-6
"""Relative to the largest change of a weight: an optimizer that divides by a gradient's size amplifies its rounding."""
UPDATE_GRADIENT_SHARE = 1e-9
"""Relative to the largest gradient: numbers with smaller gradients are not compared after an update."""


def verify_program(
    program: Program,
    workers: Workers,
    layout: CustomLayout,
    batch: Any,
    *,
    cut: BatchCut | None = None,
    weights: Mapping[str, Tensor] | None = None,
    choices: LayoutChoices = DEFAULT_CHOICES,
) -> Verdict:
    """Whether the workers compute what one process computes on the same batch, of which `batch` is this worker's share.

    Copies of the models run in float64, with dropout set to 0: nothing of the run changes. `weights` are whole ones by
    name, where the program's own are sharded. Every worker must call it, and each computes the whole batch, too, so it
    takes the memory of one. With one worker two halves of the batch stand for two. Where gradients differ the verdict
    names the layer and the likely cause.
    """

    def copied() -> Program:
        wide = copy_program(program, dtype=torch.float64, weights=weights)
        return replace(wide, precision="float32", clip=None, before_update=None)

    choices = replace(choices, transfer="float32", recompute="none")
    shares = [mapped(share, widened) for share in gather_shares(batch, workers)]
    whole = join_shares(shares)
    alone = run_alone(copied(), shares if whole is None else [whole])
    micros = [shares[workers.rank]] if workers.size > 1 else _halves(program, shares[0], cut)
    spread = run_spread(copied(), workers, layout, micros, choices)
    # Of one worker, whose two halves stand for two, each half moves buffers of its own.
    buffers = [spread.buffers] if workers.size > 1 else [run_alone(copied(), [micro]).buffers for micro in micros]
    bars = FLOAT64_TOLERANCES
    findings = compare_outcomes(alone, spread, workers, buffers, bars)
    remarks = remarks_of(program, alone, joined=whole is not None)
    if not all(one.passes for one in findings) and alone.seen.narrow:
        bars = FLOAT32_TOLERANCES
        findings = compare_outcomes(alone, spread, workers, buffers, bars)
        remarks = (
            *remarks,
            f"something computes in less than float64, so gradients were compared to {bars.gradient:.0e}",
        )
    if bars is FLOAT64_TOLERANCES and all(one.passes for one in findings):
        try:
            one, all_of_them = (with_own_optimizers(copied(), program) for _ in range(2))
        except PlaitError as error:
            remarks = (*remarks, f"{error}, so updates were not compared")
        else:
            before = {name: p.detach().clone() for name, p in one.named_parameters().items()}
            after = updated_alone(one, shares if whole is None else [whole])
            found = updated_spread(all_of_them, workers, layout, micros, choices)
            findings += compare_updates(before, after, found, alone.gradients, workers)
    verdict = Verdict(layout=_as_layout(layout, workers.size), findings=findings, remarks=remarks)
    if verdict.ok:
        return verdict

    def rerun(changed: Program) -> bool | None:
        if workers.size == 1:
            return None
        again = run_spread(changed, workers, layout, micros, choices)
        return all(finding.passes for finding in compare_outcomes(alone, again, workers, [again.buffers], bars))

    looked_at = shares[workers.rank] if whole is None else whole  # a share may be a single example
    case = FailedProof(program=copied(), alone=alone, spread=spread, findings=findings, batch=looked_at, cut=cut)
    return replace(verdict, causes=find_causes(case, workers, rerun))


def compare_outcomes(
    alone: Outcome, spread: Outcome, workers: Workers, buffers: Sequence[Mapping[str, Tensor]], bars: Tolerances
) -> tuple[Finding, ...]:
    """The error of each gradient, of losses and counts, and of buffers, the worst first; the same on all workers.

    `buffers` holds one dict for each emulated worker.
    """
    largest = max((float(one.abs().max()) for one in alone.gradients.values() if one.numel()), default=0.0)
    rows = [("loss", "sums", _error(alone.sums, spread.sums, 1e-30), bars.gradient)]
    for name in sorted({*alone.gradients, *spread.gradients}):
        found, wanted = spread.gradients.get(name), alone.gradients.get(name)
        error = _gradient_error(wanted, found, bars.min_gradient_share * largest)
        rows.append((name, "gradient", error, bars.gradient))
    for name, wanted in sorted(alone.buffers.items()):
        error = max(_error(wanted, one[name], 1e-6) for one in buffers)
        rows.append((name, "buffer", error, max(BUFFER_TOLERANCE, bars.gradient)))
    return _findings(rows, workers)


def compare_updates(
    before: Mapping[str, Tensor],
    alone: Mapping[str, Tensor],
    spread: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    workers: Workers,
) -> tuple[Finding, ...]:
    """The weight whose update by the run's optimizer is farthest from that of one process; the same on all workers.

    Numbers without a gradient but for rounding are left out: an optimizer may go by its sign.
    """
    rows = []
    largest = max((float(one.abs().max()) for one in gradients.values() if one.numel()), default=0.0)
    for name, gradient in gradients.items():
        learns = gradient.abs() > UPDATE_GRADIENT_SHARE * largest
        wanted, found = ((one[name] - before[name])[learns] for one in (alone, spread))
        rows.append((name, "update", _error(wanted, found, 1e-30), UPDATE_TOLERANCE))
    return _findings(rows, workers)[:1]


def _findings(rows: Sequence[tuple[str, str, float, float]], workers: Workers) -> tuple[Finding, ...]:
    """The findings of rows of names, kinds, this worker's errors and tolerances, the worst first; with the largest
    error of all workers."""
    errors = workers.sums.largest(torch.tensor([error for _, _, error, _ in rows], dtype=torch.float64)).tolist()
    found = [
        Finding(name=name, kind=kind, error=error, tolerance=bar, label="losses and counts" if kind == "sums" else name)
        for (name, kind, _, bar), error in zip(rows, errors, strict=True)
    ]
    return tuple(sorted(found, key=lambda one: one.excess, reverse=True))


def _gradient_error(wanted: Tensor | None, found: Tensor | None, least: float) -> float:
    """A parameter that one process does not reach has no gradient, which several workers write as zeros."""
    if wanted is None:
        return 0.0 if found is None or not found.any() else float("inf")
    if found is None:
        return float("inf") if wanted.any() else 0.0
    return _error(wanted, found, least)


def _error(wanted: Tensor, found: Tensor, least: float) -> float:
    if wanted.shape != found.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    one, other = wanted.double(), found.double()
    error = float((one - other).abs().max() / max(float(one.abs().max()), least))
    return error if error == error else float("inf")


def _halves(program: Program, share: Any, cut: BatchCut | None) -> Sequence[Any]:
    """Two parts that stand for two workers; the whole where a layer or the loss needs all samples at once, or it cannot
    be cut."""
    if program.additive == "no" or any(
        isinstance(module, GlobalBatchNorm) for model in program.models for module in model.modules()
    ):
        return [share]
    try:
        return batch_parts(share, 2, cut)
    except PlaitError:
        return [share]


def _as_layout(layout: CustomLayout, size: int) -> Layout:
    if layout == "replicate" or size == 1:
        return Layout(replicate=size)
    return Layout(shard=size, shard_what="optimizer" if layout == "shard optimizer" else "parameters")
