"""Compiles each layer by itself where the plan says so: small graphs, one compilation for all equal layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.model.gpt import Layer
from plait.model.mixture import Mixture
from plait.parallel.sharded_model import ShardedModel
from plait.partition.execution import Compile, Execution

COMPILED_SHAPES_LIMIT = 64
"""Largest number of micro-batch sizes for which a layer is compiled. Shares that follow the devices bring new ones, and
beyond torch's own limit of eight a layer would run uncompiled without a word."""


def compile_layers(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Compile the layers in place; parameter names stay as they are. Layers with experts are not compiled: the sizes of
    their products are known only once tokens are routed."""
    if execution.arithmetic.compile == "blocks":
        for chunk in sharded.chunks:
            for layer in chunk.layers.values():
                if not (isinstance(layer, Layer) and isinstance(layer.feedforward, Mixture)):
                    compile_layer(layer)
    return sharded


def compile_layer(layer: nn.Module) -> None:
    """Compile a layer in place, at its first call with each size."""
    import torch._dynamo.config as dynamo  # more than a second of imports

    dynamo.recompile_limit = max(COMPILED_SHAPES_LIMIT, dynamo.recompile_limit)
    layer.compile(dynamic=False)


# Keeps functions out of the graphs of compiled layers.


def outside_graphs(function: Any, compile: Compile) -> Any:
    """The function as compiled layers may call it, where what it does belongs to no graph. Where none are compiled it
    stays as it is: torch's compiler is a second of imports and 75 MB of each worker."""
    return torch.compiler.disable(function) if compile == "blocks" else function
