"""An optimizer's state by the names of whole weights, for any part that a worker updates: out, and in again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from plait.custom.group import Workers
from plait.custom.layouts.description import HeldPiece, WeightForm
from plait.custom.layouts.pieces import whole_of
from plait.custom.saving.tree import from_plain, to_plain
from plait.errors import PlaitError
from plait.parallel.exchange import TENSOR_DTYPES, gather_json

WeightSizes = Mapping[str, torch.Size]


def collect_optimizer(
    optimizer: Optimizer, pieces: Sequence[HeldPiece], form: WeightForm, shapes: WeightSizes, workers: Workers
) -> tuple[Any, dict[str, Tensor]]:
    """The optimizer's settings and its state of every weight, as JSON and named tensors, whole on the first worker;
    `pieces` are what it updates here, whole weights or parts of them.

    Every worker must call it; blocks where weights are cut.
    """
    tensors: dict[str, Tensor] = {}
    groups = [
        to_plain({key: value for key, value in group.items() if key != "params"}, f"group/{number}", tensors)
        for number, group in enumerate(optimizer.param_groups)
    ]
    if form == "whole":
        state = {
            piece.name: to_plain(dict(optimizer.state[piece.parameter]), piece.name, tensors)
            for piece in pieces
            if piece.parameter in optimizer.state
        }
    else:
        state = _collect_cut(optimizer, pieces, shapes, workers, tensors)
    return {"groups": groups, "state": state}, tensors


def _collect_cut(
    optimizer: Optimizer, pieces: Sequence[HeldPiece], shapes: WeightSizes, workers: Workers, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    held = {piece.name: piece for piece in pieces}
    own = {name: _described(optimizer.state[piece.parameter], piece) for name, piece in held.items()}
    everybody = gather_json(own, workers.sums)
    state: dict[str, Any] = {}
    for name, shape in shapes.items():
        known = next((one[name] for one in everybody if one.get(name)), None)
        if known is None:
            continue
        entry: dict[str, Any] = {}
        for key, (kind, value) in known.items():
            if kind in ("cut", "of the whole"):
                here = held.get(name)
                parts = {name: (here.first, optimizer.state[here.parameter][key])} if here else {}
                dtype, of_all = (value, shape) if kind == "cut" else value
                like = {name: torch.empty(tuple(of_all), dtype=TENSOR_DTYPES[dtype], device="meta")}
                whole = whole_of(parts, like, workers)[name]
                if workers.rank == 0:
                    entry[key] = to_plain(whole.cpu(), f"{name}/{key}", tensors)
            elif kind == "number":
                entry[key] = value
            else:
                entry[key] = to_plain(torch.tensor(value, dtype=TENSOR_DTYPES[kind]), f"{name}/{key}", tensors)
        state[name] = entry
    return state


def _described(state: Mapping[str, Any], piece: HeldPiece) -> dict[str, tuple[str, Any]]:
    """What kind each entry of a weight's state is: cut as the weight is, a tensor of another shape (of a weight that
    one worker has whole), a 0-dim tensor, or a number."""
    found: dict[str, tuple[str, Any]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            if value.shape == piece.parameter.shape and value.dim():
                found[key] = ("cut", dtype)
            elif value.dim():
                found[key] = ("of the whole", [dtype, list(value.shape)])
            else:
                found[key] = (dtype, value.item())
        else:
            found[key] = ("number", value)
    return found


def restore_optimizer(
    optimizer: Optimizer, pieces: Sequence[HeldPiece], shapes: WeightSizes, plain: Any, tensors: Mapping[str, Tensor]
) -> None:
    """Put settings and state of whole weights into an optimizer that updates these pieces.

    Raises PlaitError where it has other groups.
    """
    if len(plain["groups"]) != len(optimizer.param_groups):
        raise PlaitError(
            f"the saved optimizer has {len(plain['groups'])} groups of parameters, this one "
            f"{len(optimizer.param_groups)}; "
            "build it as before"
        )
    for group, saved in zip(optimizer.param_groups, plain["groups"], strict=True):
        group.update(from_plain(saved, tensors))
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    optimizer.state.clear()
    for piece in pieces:
        name = piece.name
        if name not in plain["state"]:
            continue
        on_device = bool(groups[id(piece.parameter)].get("capturable") or groups[id(piece.parameter)].get("fused"))
        entry = from_plain(plain["state"][name], tensors)
        for key, value in entry.items():
            if not isinstance(value, Tensor):
                continue
            if value.dim() == 0 and not on_device:
                entry[key] = value.clone()
                continue
            if value.shape == shapes[name] and value.dim():
                value = piece.part_of(value)
            entry[key] = value.to(piece.parameter.device, copy=True)
        optimizer.state[piece.parameter] = entry
