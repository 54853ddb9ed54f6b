"""Copies of a program's models that share nothing with it: for proofs, in other numbers, and without memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.custom.program import Program


def copy_program(program: Program, *, dtype: torch.dtype, weights: Mapping[str, Tensor] | None = None) -> Program:
    """The program with models of its own in `dtype`, which begin with `weights` (whole, by name) or the program's own.

    Its optimizers are plain SGD with a rate of 0, and it has no schedulers.
    """
    sources = program.skeletons or program.models
    skeletal = replace(program, models=sources)
    own = skeletal.named_parameters() if weights is None else weights
    memo: dict[int, Any] = {}
    copied: dict[str, nn.Parameter] = {}
    for name, parameter in skeletal.named_parameters().items():
        value = own[name].detach().to(dtype if parameter.is_floating_point() else parameter.dtype, copy=True)
        copied[name] = memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    buffers = program.named_buffers()
    for name, buffer in skeletal.named_buffers().items():
        value = buffers[name].detach()
        memo[id(buffer)] = value.to(dtype if value.is_floating_point() else value.dtype, copy=True)
    memo |= {id(one): one.detach().to(dtype, copy=True) for one in _graph_tensors(sources)}
    models = tuple(copy.deepcopy(model, memo) for model in sources)
    optimizers = tuple(torch.optim.SGD([copied[name] for name in names], lr=0.0) for names in program.trained_names)
    return replace(program, models=models, optimizers=optimizers, schedulers=(), skeletons=())


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
