"""The update of weights from global sums of gradients: division by the global count, clipping, optimizer, rate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from plait.custom.layouts.parallel_program import ParallelProgram
from plait.custom.program import Program, parameters_of
from plait.custom.seeds import seed_everything, seed_from
from plait.custom.stepping.fused import begin_momentum
from plait.custom.stepping.gradients import GlobalSums
from plait.errors import PlaitError
from plait.parallel.gradient_norm import clip_factor

_UPDATES: ContextVar[bool] = ContextVar("plait_updates", default=False)
"""Whether a step of plait's is updating weights now."""


UpdateEnd = Literal["finite", "skipped"]
"""Whether weights were updated, or float16 left gradients that are not finite."""


def update_weights(
    program: Program, parallel: ParallelProgram, index: int, sums: GlobalSums, rate_factor: float, step: int
) -> UpdateEnd:
    """Make the gradients those of the mean, clip them, and let the optimizers update; "skipped" where float16 left
    numbers that are not finite, and nothing was updated.

    Every worker must call it. A count of 0 divides by 1: then all losses, and gradients, are 0. Gradients that have
    been divided by this count already are not passed over again, unless they are clipped.
    """
    optimizers, scale = program.optimizers_of(index), sums.rest
    gradients = [p.grad for one in optimizers for p in parameters_of(one) if p.grad is not None]
    if program.precision == "fp16" and not bool(parallel.squares(index).isfinite()):
        return "skipped"
    if program.before_update is not None:
        _multiply(gradients, scale)
        _let_change(program, parallel, index, step)
        scale = torch.ones_like(scale)
    if program.clip is not None:
        length = parallel.squares(index).to(scale.device).sqrt() * scale
        scale = scale * clip_factor(length, program.clip)
    if scale.device.type != "cpu" or float(scale) != 1.0:  # a GPU is not waited for
        _multiply(gradients, scale)
    seed_everything(seed_from("update", program.seed, step, index))  # optimizers that draw: alike on all workers
    for optimizer in optimizers:
        begin_momentum(optimizer)
        token = _UPDATES.set(True)
        try:
            with _rate(optimizer, rate_factor):
                optimizer.step()
        finally:
            _UPDATES.reset(token)
    parallel.publish(index)
    return "finite"


def _let_change(program: Program, parallel: ParallelProgram, index: int, step: int) -> None:
    """Let the person's function change whole gradients; where weights are cut each worker takes its own part back."""
    assert program.before_update is not None
    whole = parallel.full_gradients(index)
    changed = dict(whole)
    seed_everything(seed_from("before update", program.seed, step, index))
    program.before_update(changed)
    if changed.keys() != whole.keys() or any(changed[name].shape != one.shape for name, one in whole.items()):
        raise PlaitError("before_update has added, removed or reshaped gradients; change their numbers alone")
    for piece in parallel.pieces(index):
        if piece.parameter.grad is not None:
            piece.parameter.grad.copy_(piece.part_of(changed[piece.name]))


def refuse_other_updates(program: Program) -> list[RemovableHandle]:
    """Let an optimizer's own `step` raise PlaitError until these handles are removed: weights would be updated a second
    time, with gradients that a step has used already."""

    def refuse(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not _UPDATES.get():
            raise PlaitError(
                "optimizer.step() is called in addition to run.step, which has updated the weights already; remove it, "
                "and backward() and zero_grad() with it"
            )

    return [optimizer.register_step_pre_hook(refuse) for optimizer in program.optimizers]


def _multiply(gradients: list[Tensor], scale: Tensor) -> None:
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for (dtype, device), some in by_kind.items():
        # A factor in 16 bits would be rounded, for all gradients alike.
        exact = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
        torch._foreach_mul_(some, scale.to(device, exact))  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def _rate(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """The optimizer's rates times a factor, for one update: schedulers go on from the rates without it."""
    if factor == 1.0:
        yield
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
