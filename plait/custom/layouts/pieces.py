"""Weights of which each worker updates a part: the optimizer's parameters, and the whole put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from plait.custom.group import Workers
from plait.custom.layouts.description import CustomLayout, HeldPiece
from plait.custom.program import Program, gradient_hooks, is_plaits_own
from plait.errors import PlaitError
from plait.parallel.exchange import sum_of_bits


def check_apart(program: Program, layout: CustomLayout) -> None:
    """Raise PlaitError where weights share memory, or an optimizer has taken steps: neither survives being cut."""
    for name, hooks in gradient_hooks(program).items():
        if any(hook.__module__.startswith("plait.") for hook in hooks if is_plaits_own(hook)):
            raise PlaitError(f"{name} is held by an earlier run of plait.spread; call its run.close() first")
    begins: dict[int, str] = {}
    for name, parameter in program.named_parameters().items():
        other = begins.setdefault(parameter.untyped_storage().data_ptr(), name)
        if other != name and parameter.numel():
            raise PlaitError(
                f'{name} and {other} are views of one memory, which layout "{layout}" would take apart; take '
                'layout="replicate", or make each a tensor of its own'
            )
    for number, optimizer in enumerate(program.optimizers):
        if optimizer.state and not (type(optimizer) is Adagrad and not _has_stepped(optimizer)):
            raise PlaitError(
                f"optimizer {number} has taken steps already; give it to plait.spread before its first step"
            )


def _has_stepped(optimizer: Optimizer) -> bool:
    return any(float(state["step"]) > 0 for state in optimizer.state.values())


def groups_by_name(program: Program, index: int) -> dict[str, int]:
    """For each weight that a loss trains the number of its group, counted through the loss's optimizers."""
    names = {id(parameter): name for name, parameter in program.trained_by(index).items()}
    groups = enumerate(_groups(program.optimizers_of(index)))
    return {names[id(p)]: number for number, group in groups for p in group["params"] if id(p) in names}


def update_pieces(optimizers: Sequence[Optimizer], groups: Mapping[str, int], pieces: Sequence[HeldPiece]) -> None:
    """Let a loss's optimizers update these pieces in place of the whole weights, each in its weight's group."""
    for number, group in enumerate(_groups(optimizers)):
        group["params"] = [piece.parameter for piece in pieces if groups[piece.name] == number]
    for optimizer in optimizers:
        if type(optimizer) is Adagrad:  # torch gives it its state from the start
            optimizer.state.clear()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    total = torch.full_like(parameter, group["initial_accumulator_value"])
                    optimizer.state[parameter] = {"step": torch.zeros(()), "sum": total.detach()}


def _groups(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def whole_of(own: Mapping[str, tuple[int, Tensor]], like: Mapping[str, Tensor], workers: Workers) -> dict[str, Tensor]:
    """Whole tensors, shaped as those in `like`, of the workers' parts, each with its first number. Every worker must
    call it; blocks."""
    found = {}
    for name, shaped in like.items():
        whole = torch.zeros(shaped.shape.numel(), dtype=shaped.dtype, device=workers.device)
        if name in own:
            first, part = own[name]
            whole[first : first + part.numel()] = part.detach().reshape(-1)
        found[name] = sum_of_bits(whole, workers.sums).view(shaped.shape)
    return found
