"""The optimizer's groups and state, the learning-rate schedule, and this rank's contribution to the gradient's norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import cos, pi

import torch
from torch import Tensor

from plait.parallel.gradient_norm import squares_of
from plait.parallel.sharded_model import OptimizerUnit
from plait.planner.plan import OptimizerPlan
from plait.trainer.optimizer.fused import FusedAdamW, FusedOptimizer, FusedSGD, ParameterGroup

FINAL_FRACTION = 0.1
"""Fraction of the peak learning rate at which "cosine" ends (Hoffmann et al. 2022)."""
DECAY_FRACTION = 0.2
"""Fraction of the steps over which "wsd" falls to zero (Hägele et al. 2024)."""


# Note [SGD's weight decay is classical]: it is added to the gradient after clipping, and so runs through the momentum.
# Published values for SGD are meant so (He et al. 2015, Goyal et al. 2017), and the fused kernel adds it on its way.
# AdamW decouples it because it divides the gradient by its size (Loshchilov & Hutter 2019); SGD divides by nothing.


def make_optimizer(units: Sequence[OptimizerUnit], plan: OptimizerPlan) -> FusedOptimizer:
    """The plan's optimizer over this rank's units, with weight decay on matrices only."""
    alike: dict[tuple[bool, torch.dtype], list[Tensor]] = {}
    for unit in sorted(units, key=lambda unit: not unit.decays):
        alike.setdefault((unit.decays, unit.parameter.dtype), []).append(unit.parameter)
    groups = [
        ParameterGroup(parameters=parameters, weight_decay=plan.weight_decay if decays else 0.0)
        for (decays, _), parameters in alike.items()
    ]
    if plan.kind == "sgd":  # see Note [SGD's weight decay is classical]
        optimizer = FusedSGD(groups, lr=plan.lr, momentum=plan.momentum)
    else:
        optimizer = FusedAdamW(groups, lr=plan.lr, betas=plan.betas)
    # Not in the first step, as torch.optim does: the first step then holds what every step holds.
    for parameter in (unit.parameter for unit in units):
        moments = {name: torch.zeros_like(parameter) for name in moment_names(plan).values()}
        set_state(optimizer, parameter, moments, torch.zeros(()) if plan.kind == "adamw" else None)
    return optimizer


def moment_names(plan: OptimizerPlan) -> Mapping[str, str]:
    """The names of the moments in a checkpoint, each with its name in torch's optimizer."""
    if plan.kind == "adamw":
        return {"adam_m": "exp_avg", "adam_v": "exp_avg_sq"}
    return {"sgd_momentum": "momentum_buffer"} if plan.moments else {}


def set_state(
    optimizer: FusedOptimizer, parameter: Tensor, moments: Mapping[str, Tensor], updates: Tensor | None
) -> None:
    """Give a parameter's optimizer state these moments and, where the optimizer counts them, the number of updates."""
    # A copy each: AdamW counts in place, and one tensor for all would count a step once for every parameter.
    count = {} if updates is None else {"step": updates.to(parameter.device, torch.float32, copy=True)}
    optimizer.state[parameter] = {**count, **moments}


def updates_counted(optimizer: FusedOptimizer) -> Tensor | None:
    """AdamW's number of updates done, shape []; None for SGD, which counts none."""
    return next(iter(optimizer.state.values())).get("step")


def learning_rate(plan: OptimizerPlan, step: int, steps: int) -> float:
    """The learning rate of update number `step` (from 0) of `steps`."""
    if step < plan.warmup_steps:
        return plan.lr * (step + 1) / plan.warmup_steps
    after = (step - plan.warmup_steps) / max(1, steps - plan.warmup_steps)
    if plan.schedule == "cosine":
        return plan.lr * (FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + cos(pi * after)))
    if plan.schedule == "wsd":
        left = (steps - step) / max(1.0, DECAY_FRACTION * steps)
        return plan.lr * min(1.0, left)
    return plan.lr


def owned_squares(units: Sequence[OptimizerUnit], *, like: Tensor) -> Tensor:
    """The sum of squares of the gradients that this rank owns: shape [1], dtype and device of `like`.

    Each element of the model is owned by one rank, so the sum over all ranks is the square of the gradient's norm.
    """
    owned = [unit.parameter.grad for unit in units if unit.owned and unit.parameter.grad is not None]
    return squares_of(owned, like.device).to(like.dtype).reshape(1)


def update(optimizer: FusedOptimizer, units: Sequence[OptimizerUnit], *, factor: Tensor, norm: Tensor) -> None:
    """Take one optimizer step with the gradients times `factor`; it is skipped where the norm is not finite. The
    `.grad` tensors hold the scaled gradients afterwards.

    A fused optimizer reads every gradient anyway and divides it on the way: in float32 that saves a pass through
    memory. Its divisor is a float32, so exact runs in float64 multiply beforehand.
    """
    gradients = [unit.parameter.grad for unit in units if unit.parameter.grad is not None]
    optimizer.found_inf = (~torch.isfinite(norm)).float()
    if gradients and gradients[0].dtype == torch.float32:
        optimizer.grad_scale = factor.reciprocal().float()
    else:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
    optimizer.step()
