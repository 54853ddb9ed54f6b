"""`recompute`: what a layer computes again in the backward pass instead of keeping it.

"full" keeps a layer's input alone and runs the layer a second time. "selective" also keeps the results of its products
and of attention, where the work is, and repeats what is cheap and large: norms, rotation, activation. Both run the same
operations on the same numbers, so gradients are the same bit for bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from plait.devices import DEVICE_TRAITS
from plait.model.attention import Rows
from plait.model.gpt import Layer, RunLayer, run_layer
from plait.parallel.sharded_model import ShardedModel
from plait.partition.execution import Execution

_aten: Any = torch.ops.aten

PRODUCT_OPERATIONS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten._grouped_mm.default,
    torch.ops.plait.grouped_product.default,
)
ATTENTION_OPERATIONS = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)


def recompute(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Make every layer keep as little for backward as the layout says; names and values of weights stay."""
    if execution.layout.recompute != "none":
        run = layer_runner(execution)
        for chunk in sharded.chunks:
            for layer in chunk.layers.values():
                assert isinstance(layer, Layer)
                layer.run = run
    return sharded


def layer_runner(execution: Execution) -> RunLayer:
    """How a layer runs under the plan's `recompute`, which must not be "none"."""
    if execution.layout.recompute == "full":
        return run_keeping_input
    # Attention over the axis `context` adds to its kernels' results in place, so it keeps its own way.
    kept = PRODUCT_OPERATIONS if execution.layout.context > 1 else PRODUCT_OPERATIONS + ATTENTION_OPERATIONS
    if DEVICE_TRAITS[execution.device].kernels == "CUDA's" and execution.layout.context == 1:
        import torch.nn.attention.varlen  # registers the kernel for documents; a second of imports

        kept += (torch.ops.torch_attn._varlen_attn.default,)
    return partial(run_keeping, kept)


def run_keeping_input(layer: Layer, stream_nd: Tensor, rows: Rows) -> Tensor:
    """Run a layer and keep only its input for the backward pass."""
    return _checkpoint(layer, stream_nd, rows)


def run_keeping(kept: tuple[Any, ...], layer: Layer, stream_nd: Tensor, rows: Rows) -> Tensor:
    """Run a layer and keep its input and the results of the `kept` operations for the backward pass."""
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    return _checkpoint(layer, stream_nd, rows, context_fn=contexts)


def _checkpoint(layer: Layer, stream_nd: Tensor, rows: Rows, **contexts: Any) -> Tensor:
    # `rows` is no argument: torch 2.11's compiler takes one apart, and recompiles for each number of documents.
    def run(stream_nd: Tensor) -> Tensor:
        return run_layer(layer, stream_nd, rows)

    # A layer draws no random number, so no generator's state is worth keeping. Where no contexts are wanted none may be
    # given: a compiler takes even torch's own empty ones for a selection of operations, and fails.
    result = checkpoint(run, stream_nd, use_reentrant=False, preserve_rng_state=False, **contexts)
    assert isinstance(result, Tensor)
    return result


def _policy(kept: tuple[Any, ...], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE
