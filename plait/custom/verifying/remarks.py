"""Remarks on a user's program apart from its gradients: dropout, unused weights, shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from plait.custom.exact_norm.batch_norm import GlobalBatchNorm
from plait.custom.program import Program

if TYPE_CHECKING:
    from plait.custom.verifying.outcome import Outcome

NAMES_SHOWN = 3
CONVERT_ADVICE = "model = plait.convert_batch_norm(model) computes over all workers' samples"


def first_remarks(program: Program, workers: int) -> tuple[str, ...]:
    """Remarks on a program before its first step: the effects of several workers, or of 16 bits."""
    remarks = []
    norms = local_norms(program)
    if norms and workers > 1:
        remarks.append(
            f"{names_text(norms)}: BatchNorm over each worker's own samples, where one process sees the whole batch; "
            f"{CONVERT_ADVICE}"
        )
    trained = [program.trained_by(index) for index in range(len(program.losses))]
    narrow = [name for some in trained for name, p in some.items() if p.dtype in (torch.bfloat16, torch.float16)]
    if narrow:
        remarks.append(
            f"{names_text(narrow)}: weights of 16 bits, which lose small updates; "
            'float32 weights with precision="bf16" compute as fast and keep them'
        )
    return tuple(remarks)


def remarks_of(program: Program, alone: Outcome, *, joined: bool) -> tuple[str, ...]:
    """Remarks on a program even if its gradients are equal."""
    remarks = []
    if alone.seen.drops:
        remarks.append("dropout was set to 0 in this proof; in runs it is drawn from (seed, step, rank)")
    trained = [name for index in range(len(program.losses)) for name in program.trained_by(index)]
    unused = [name for name in trained if name not in alone.gradients]
    if unused:
        remarks.append(
            f"{names_text(unused)} got no gradient from this batch: no loss uses {_it(unused)}, so leave {_it(unused)} "
            "out of the optimizer, or let the loss use it"
        )
    for first, second in overlapping_parameters(program):
        remarks.append(
            f"{first} and {second} are views of the same memory: an update of one changes the other, and sharding "
            "would part them; make them one parameter"
        )
    if alone.seen.changed_views:
        remarks.append(
            f"the output of {names_text(alone.seen.changed_views)} is a view of another tensor and is changed in place "
            "later, which sharded parameters refuse; add .clone(), or use the operation that is not in place"
        )
    if not joined:
        remarks.append(
            "the shares of this batch cannot be joined along dim 0, so that each was computed as it is: layers that "
            "mix samples were not compared"
        )
        norms = local_norms(program)
        if norms:
            remarks.append(f"{names_text(norms)} normalizes each share by itself; {CONVERT_ADVICE}")
    return tuple(remarks)


def overlapping_parameters(program: Program) -> list[tuple[str, str]]:
    """Pairs of parameters that are not the same and share memory."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in program.named_parameters().items():
        if parameter.is_meta or not parameter.numel() or type(parameter.data) is not Tensor:
            continue
        sizes = zip(parameter.shape, parameter.stride(), strict=True)
        first = int(parameter.storage_offset())
        last = first + int(sum((size - 1) * stride for size, stride in sizes))
        spans.setdefault(parameter.untyped_storage().data_ptr(), []).append((first, last, name))
    pairs = []
    for some in spans.values():
        some.sort()
        pairs += [(one[2], two[2]) for one, two in pairwise(some) if two[0] <= one[1]]
    return pairs


def local_norms(program: Program) -> list[str]:
    """BatchNorm layers in training that normalize each worker's own samples."""
    return [
        prefix + name
        for prefix, model in program.prefixed_models()
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, GlobalBatchNorm)
        if module.training or not module.track_running_stats
    ]


def names_text(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown + (f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "")


def _it(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"
