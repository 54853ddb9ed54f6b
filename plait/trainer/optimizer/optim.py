"""The optimizer's groups and state, the learning-rate schedule, and this rank's contribution to the gradient's norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import cos, pi

import torch
from torch import Tensor

from plait.model.names import is_hidden_matrix
from plait.parallel.gradient_norm import squares_of
from plait.parallel.sharded_model import OptimizerUnit
from plait.parallel.whole_matrices import MatrixExchange
from plait.partition.execution import Precision
from plait.planner.plan import OptimizerPlan
from plait.trainer.optimizer.fused import FusedAdamW, FusedSGD, ParameterGroup, RunOptimizer
from plait.trainer.optimizer.moments import moment_names
from plait.trainer.optimizer.muon import MuonWithAdamW

FINAL_FRACTION = 0.1
"""Fraction of the peak learning rate at which "cosine" ends (Hoffmann et al. 2022)."""
DECAY_FRACTION = 0.2
"""Fraction of the steps over which "wsd" falls to zero (Hägele et al. 2024)."""


# Note [SGD's weight decay is classical]: it is added to the gradient after clipping, and so runs through the momentum.
# Published values for SGD are meant so (He et al. 2015, Goyal et al. 2017), and the fused kernel adds it on its way.
# AdamW decouples it because it divides the gradient by its size (Loshchilov & Hutter 2019); SGD divides by nothing.


def make_optimizer(
    units: Sequence[OptimizerUnit],
    plan: OptimizerPlan,
    orthogonalized_in: Precision = "float32",
    exchange: Callable[[Sequence[OptimizerUnit]], MatrixExchange] = MatrixExchange,
) -> RunOptimizer:
    """The plan's optimizer over this rank's units, with weight decay on matrices only.

    Pieces of Muon's matrices are brought together by an `exchange`, for which every rank must call this, and are
    `orthogonalized_in` this precision.
    """
    if plan.kind == "muon":
        optimizer = _muon(units, plan, MATRIX_DTYPES[orthogonalized_in], exchange)
    elif plan.kind == "sgd":  # see Note [SGD's weight decay is classical]
        optimizer = FusedSGD(_groups(units, plan), lr=plan.lr, momentum=plan.momentum)
    else:
        optimizer = FusedAdamW(_groups(units, plan), lr=plan.lr, betas=plan.betas)
    # Not in the first step, as torch.optim does: the first step then holds what every step holds.
    for unit in units:
        names = moment_names(plan, unit.parts[0].name)
        moments = {name: torch.zeros_like(unit.parameter) for name in names.values()}
        set_state(optimizer, unit.parameter, moments, torch.zeros(()) if "adam_m" in names else None)
    return optimizer


MATRIX_DTYPES: Mapping[Precision, torch.dtype] = {
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def _groups(units: Sequence[OptimizerUnit], plan: OptimizerPlan) -> list[ParameterGroup]:
    alike: dict[tuple[bool, torch.dtype], list[Tensor]] = {}
    for unit in sorted(units, key=lambda unit: not unit.decays):
        alike.setdefault((unit.decays, unit.parameter.dtype), []).append(unit.parameter)
    return [
        ParameterGroup(parameters=parameters, weight_decay=plan.weight_decay if decays else 0.0)
        for (decays, _), parameters in alike.items()
    ]


def _muon(
    units: Sequence[OptimizerUnit],
    plan: OptimizerPlan,
    dtype: torch.dtype,
    exchange: Callable[[Sequence[OptimizerUnit]], MatrixExchange],
) -> MuonWithAdamW:
    matrices = [unit for unit in units if is_hidden_matrix(unit.parts[0].name)]
    assert all(is_hidden_matrix(part.name) for unit in matrices for part in unit.parts), "a bucket of two kinds"
    others = [unit for unit in units if not is_hidden_matrix(unit.parts[0].name)]
    adamw_lr = plan.lr if plan.adamw_lr is None else plan.adamw_lr
    return MuonWithAdamW(
        matrices,
        exchange(matrices),
        FusedAdamW(_groups(others, plan), lr=adamw_lr, betas=plan.betas),
        lr=plan.lr,
        momentum=plan.momentum,
        weight_decay=plan.weight_decay,
        adamw_share=adamw_lr / plan.lr if plan.lr else 1.0,
        dtype=dtype,
    )


def set_state(
    optimizer: RunOptimizer, parameter: Tensor, moments: Mapping[str, Tensor], updates: Tensor | None
) -> None:
    """Set a parameter's moments and, if the optimizer counts them, its number of updates."""
    # A copy each: AdamW counts in place, and a shared tensor would count a step once per parameter.
    count = {} if updates is None else {"step": updates.to(parameter.device, torch.float32, copy=True)}
    optimizer.state[parameter] = {**count, **moments}


def updates_counted(optimizer: RunOptimizer) -> Tensor | None:
    """AdamW's number of updates so far, shape []; None if AdamW updates no weight of this rank."""
    return next((state["step"] for state in optimizer.state.values() if "step" in state), None)


def learning_rate(plan: OptimizerPlan, step: int, steps: int) -> float:
    """The learning rate of update number `step` (from 0) of `steps`."""
    if step < plan.warmup_steps:
        return plan.lr * (step + 1) / plan.warmup_steps
    after = (step - plan.warmup_steps) / max(1, steps - plan.warmup_steps)
    if plan.schedule == "cosine":
        return plan.lr * (FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + cos(pi * after)))
    if plan.schedule == "linear":
        return plan.lr * (1 - after)
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


def update(optimizer: RunOptimizer, units: Sequence[OptimizerUnit], *, factor: Tensor, norm: Tensor) -> None:
    """Take one optimizer step with the gradients times `factor`; it is skipped if the norm is not finite. The `.grad`
    tensors contain the scaled gradients afterwards.

    A fused optimizer reads every gradient anyway and divides it on the way, which in float32 saves a pass through
    memory. Its divisor is a float32, so exact runs in float64 multiply beforehand. Every rank must call it.
    """
    gradients = [unit.parameter.grad for unit in units if unit.parameter.grad is not None]
    optimizer.found_inf = (~torch.isfinite(norm)).float()
    if gradients and gradients[0].dtype == torch.float32:
        optimizer.grad_scale = factor.reciprocal().float()
    else:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
    optimizer.step()
