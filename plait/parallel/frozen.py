"""Frozen matrices in the numbers that products compute in, or in few bits: a run in 16 bits keeps them rounded, and
only so; QLoRA keeps them in blocks of four or eight bits a number."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plait.model.linear import HALF_DTYPES, Linear
from plait.model.quantization import QuantizedPart
from plait.model.weights import is_quantized
from plait.parallel.sharded_model import ShardedModel
from plait.partition.boxes import cut_box
from plait.partition.execution import Execution

# Note [frozen matrices are rounded once]: autocast rounds a weight before each product, and an update needs the weight
# as it was before. A frozen one has no update: the rounded copy is all that anybody reads, bit for bit, in half the
# memory and without a cast for each micro-batch. Embeddings, norms and biases stay float32, as the stream does.


def quantize_frozen(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Keep the frozen matrices of layers in blocks where the shape says so; each rank those that its part lies in."""
    shape = execution.shape
    if shape.adapter is None or shape.adapter.quantization == "none":
        return sharded
    parts, index = mesh["tensor"].size(), mesh["tensor"].get_local_rank()
    for chunk in sharded.chunks:
        for name in [name for name, _ in chunk.named_parameters() if is_quantized(name, shape)]:
            box, layer = cut_box(name, shape, parts, index), chunk.get_submodule(name.removesuffix(".weight"))
            assert isinstance(layer, Linear), name
            (rows, columns), (top, left), (height, width) = box.shape, box.offset, box.extent
            layer.quantize(
                QuantizedPart(
                    quantization=shape.adapter.quantization,
                    shape=(rows, columns),
                    offset=(top, left),
                    extent=(height, width),
                )
            )
    return sharded


def round_frozen(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Keep the frozen weights of linear layers in 16 bits where the run computes in them."""
    if (dtype := HALF_DTYPES.get(execution.arithmetic.precision)) is not None:
        for chunk in sharded.chunks:
            for module in chunk.modules():
                if isinstance(module, Linear) and module.part is None and not module.weight.requires_grad:
                    module.weight = nn.Parameter(module.weight.detach().to(dtype), requires_grad=False)
    return sharded
