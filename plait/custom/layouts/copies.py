"""Copies of a program's models that share nothing with it: for proofs, in other numbers, and without memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from plait.checked_json import one_line
from plait.custom.program import Program
from plait.errors import PlaitError


def copy_program(
    program: Program, *, dtype: torch.dtype | Literal["own"], weights: Mapping[str, Tensor] | None = None
) -> Program:
    """The program with separate models in `dtype`, which begin with `weights` (whole, by name) or the program's own.

    Its optimizers are plain SGD with a rate of 0, and it has no schedulers.
    """
    sources = program.skeletons or program.models
    skeletal = replace(program, models=sources)
    own = skeletal.named_parameters() if weights is None else weights
    memo: dict[int, Any] = {}
    copied: dict[str, nn.Parameter] = {}
    for name, parameter in skeletal.named_parameters().items():
        value = _copied(own[name], dtype)
        copied[name] = memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    buffers = program.named_buffers()
    for name, buffer in skeletal.named_buffers().items():
        memo[id(buffer)] = _copied(buffers[name], dtype)
    memo |= {id(one): _copied(one, dtype) for one in _graph_tensors(sources)}
    models = tuple(copy.deepcopy(model, memo) for model in sources)
    optimizers = tuple(
        torch.optim.SGD([copied[name] for name in dict.fromkeys(chain.from_iterable(groups))], lr=0.0)
        for groups in program.group_names
    )
    return replace(program, models=models, optimizers=optimizers, schedulers=(), skeletons=())


def _copied(tensor: Tensor, dtype: torch.dtype | Literal["own"]) -> Tensor:
    kept = dtype == "own" or not tensor.is_floating_point()
    return tensor.detach().to(tensor.dtype if kept else dtype, copy=True)  # type: ignore[arg-type]


def with_own_optimizers(copied: Program, program: Program) -> Program:
    """A copy of a program with new optimizers of the same kinds and options, without state, in place of its SGD.

    Raises PlaitError where one cannot be made again from the options in its groups.
    """
    named = copied.named_parameters()
    optimizers = []
    for optimizer, groups in zip(program.optimizers, program.group_names, strict=True):
        kind: Any = type(optimizer)
        taken = {name for name in signature(kind).parameters if name != "params"}
        given = [
            {name: value for name, value in group.items() if name in taken} | {"params": [named[n] for n in names]}
            for group, names in zip(optimizer.param_groups, groups, strict=True)
        ]
        try:
            optimizers.append(kind(given, **{n: v for n, v in given[0].items() if n != "params"}))
        except Exception as error:  # of the person's own code
            raise PlaitError(
                f"{kind.__name__} cannot be made again from the options in its groups ({one_line(str(error))})"
            ) from None
    return replace(copied, optimizers=tuple(optimizers))


def skeletons_of(program: Program) -> tuple[nn.Module, ...]:
    """The models without memory: the same modules over tensors of the meta device."""
    memo: dict[int, Any] = {}
    for parameter in program.named_parameters().values():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in program.named_buffers().values():
        memo[id(buffer)] = buffer.detach().to("meta")
    memo |= {id(one): one.detach().to("meta") for one in _graph_tensors(program.models)}
    return tuple(copy.deepcopy(model, memo) for model in program.models)


def _graph_tensors(models: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Results of a forward pass that modules keep as attributes, which deepcopy refuses."""
    for model in models:
        for module in model.modules():
            for value in vars(module).values():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    yield value
