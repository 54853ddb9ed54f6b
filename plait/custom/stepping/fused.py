"""torch's fused updates on processors: one pass over weights, gradients and state, where its default takes several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from plait.custom.program import Program, parameters_of

FUSED = (SGD, Adam, AdamW)
"""Optimizers of torch that update in one pass on processors, too; a subclass may compute something else."""
OPEN = ("foreach", "fused")
"""Options of theirs by which a person says how updates are computed; None leaves it to torch, which on processors takes
one tensor and one operation at a time."""


def fuse_updates(program: Program) -> str:
    """Let optimizers that leave it open update in one pass: the same mathematics. Returns what was done in words; empty
    where nothing was."""
    fused = [one for one in program.optimizers if _leaves_it_open(one) and _can_be_fused(one)]
    for optimizer in fused:
        for group in optimizer.param_groups:
            group["fused"] = True
    return fused_text([type(one).__name__ for one in fused]) if fused else ""


def fused_text(optimizers: Sequence[str]) -> str:
    """The message about these optimizers."""
    names = " and ".join(dict.fromkeys(optimizers))
    return f"updates by torch's fused {names}, one pass over weights and state; fused=False keeps the usual ones"


def _leaves_it_open(optimizer: Optimizer) -> bool:
    """Whether no implementation was chosen, by an option or by steps taken already."""
    if type(optimizer) not in FUSED or optimizer.state:
        return False
    groups = optimizer.param_groups
    chosen = any(group.get(name) is not None for group in groups for name in OPEN)
    return not chosen and not any(group.get("differentiable") or group.get("capturable") for group in groups)


def _can_be_fused(optimizer: Optimizer) -> bool:
    """Whether all weights are floating-point numbers of processors without gaps in memory, over which torch's fused
    updates (2.13) would go as if there were none. Dampening needs to know each weight's first step."""
    dampened = any(group.get("dampening") for group in optimizer.param_groups)
    return not dampened and all(
        p.device.type == "cpu" and p.is_floating_point() and torch.empty_like(p, device="meta").stride() == p.stride()
        for p in parameters_of(optimizer)
    )


def begin_momentum(optimizer: Optimizer) -> None:
    """Give zeros as momentum to weights whose first gradient comes after that of others (a layer that is left out in
    some steps): torch's fused SGD (2.13) refuses a weight without one, and zeros are what its usual update begins
    with."""
    for group in optimizer.param_groups:
        if not (isinstance(optimizer, SGD) and group.get("fused") and group.get("momentum")):
            continue
        reached = [p for p in group["params"] if p.grad is not None]
        missing = [p for p in reached if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        if len(missing) < len(reached):
            for parameter in missing:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
