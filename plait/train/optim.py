"""AdamW's parameter groups, the schedule of the learning rate, and the global norm of the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn

from plait.model.names import decays
from plait.plan.plan import OptimizerPlan

FINAL_FRACTION = 0.1
"""Of the peak, where cosine ends (Hoffmann et al. 2022)."""
DECAY_FRACTION = 0.2
"""Of the steps, over which "wsd" falls to zero (Hägele et al. 2024)."""


def make_optimizer(model: nn.Module, plan: OptimizerPlan) -> torch.optim.AdamW:
    """AdamW over the model's parameters, weight decay on matrices only."""
    named = list(model.named_parameters())
    decayed = [p for name, p in named if decays(name)]
    plain = [p for name, p in named if not decays(name)]
    groups = [
        {"params": decayed, "weight_decay": plan.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=plan.lr, betas=plan.betas, eps=1e-8, fused=True)


def learning_rate(plan: OptimizerPlan, step: int, steps: int) -> float:
    """The learning rate of update number `step` (from 0) of `steps`: a pure function."""
    if step < plan.warmup_steps:
        return plan.lr * (step + 1) / plan.warmup_steps
    after = (step - plan.warmup_steps) / max(1, steps - plan.warmup_steps)
    if plan.schedule == "cosine":
        return plan.lr * (FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + cos(pi * after)))
    if plan.schedule == "wsd":
        left = (steps - step) / max(1.0, DECAY_FRACTION * steps)
        return plan.lr * min(1.0, left)
    return plan.lr


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm over all gradients together, each parameter counted once; a scalar on their device."""
    norms = torch._foreach_norm(list(gradients))  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_factor(norm: Tensor, limit: float | None) -> Tensor:
    """What to multiply gradients by so that their norm is `limit` at most; never waits for the device."""
    if limit is None:
        return torch.ones_like(norm)
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def update(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], *, factor: Tensor, norm: Tensor) -> None:
    """One update by the gradients times `factor`, which `.grad` then holds; left out where the norm is not finite.

    Fused AdamW reads every gradient anyway and divides it on the way: in float32 that saves a pass through memory.
    Its divisor is a float32, so exact runs in float64 multiply beforehand.
    """
    fused: Any = optimizer
    fused.found_inf = (~torch.isfinite(norm)).float()
    if gradients[0].dtype == torch.float32:
        fused.grad_scale = factor.reciprocal().float()
    else:
        torch._foreach_mul_(list(gradients), factor)  # pyright: ignore[reportPrivateImportUsage]
    optimizer.step()
