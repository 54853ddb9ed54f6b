"""Forward and backward of plait's model on fake CUDA tensors, compiled and computed again, as documents vary.

Run by build.py with described_driver.c, in an environment with a CUDA build of torch; exits with 1 where something is
not as it should be. Fake tensors have shapes, types and a device, but no numbers.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.errors import PlaitError
from plait.layout import Layout, Recompute
from plait.machines.gpus import TorchGpus
from plait.model.attention import Documents, Rows, cumulative_lengths, of_any_length
from plait.model.gpt import GPT, Layer
from plait.model.shape import ModelShape
from plait.parallel.mesh import use_gpu
from plait.parallel.recompute import layer_runner
from plait.partition.execution import Execution, RunArithmetic
from plait.trainer.loss import sum_of_losses

SHAPE = ModelShape(layers=3, width=128, heads=8, kv_heads=2, head_width=16, ffn=256, vocabulary=512, sequence=64)
ROWS, STEPS, STEPS_WITH_NEW_GRAPHS = 2, 14, 10
MOST_GRAPHS = 2


class Graphs:
    """A compiler that counts what it is given, and runs it operation by operation after torch's own division into
    forward and backward."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return aot_eager_decomp_partition(graph, inputs)


@dataclass(slots=True)
class PlacedDocuments(Documents):
    """Documents that are on the device already: fake tensors cannot be pinned."""

    def on(self, device: torch.device, *, longest: int, positions_bt: Tensor) -> Documents:
        return self


def main() -> int:
    library = TorchGpus()
    assert library.build().cuda and library.count() == 1, "this is no CUDA build, or the described driver is missing"
    print(f"torch {torch.__version__}, {library.gpu(0)}")
    failures = int(not is_refused_for_running())
    for recompute, packed in product(("none", "selective", "full"), ("documents", "rows")):
        torch._dynamo.reset()
        try:
            counts = graphs_of_steps(recompute, packed)  # type: ignore[arg-type]
            is_right = counts[-1] <= MOST_GRAPHS and counts[-1] == counts[STEPS_WITH_NEW_GRAPHS - 1]
            print(
                f"{recompute}, {packed}: {counts[-1]} graphs" + ("" if is_right else f", one after the other: {counts}")
            )
        except Exception:
            is_right = False
            print(f"{recompute}, {packed}: {traceback.format_exc()}")
        failures += not is_right
    kept = {what: kept_bytes(what) for what in ("none", "selective", "full")}
    print("bytes that a compiled layer keeps: " + ", ".join(f"{what} {size}" for what, size in kept.items()))
    failures += not kept["none"] > 1.3 * kept["selective"] > 4 * kept["full"]
    return int(failures > 0)


def is_refused_for_running() -> bool:
    """Whether a rank that is about to compute here says, in a sentence, that this GPU does not."""
    try:
        use_gpu(0)
    except PlaitError as error:
        print(f"refused: {error}")
        return "does not compute" in str(error)
    print("a GPU that exists in a description only was taken for one that computes")
    return False


def kept_bytes(recompute: Recompute) -> int:
    """What one compiled layer saves for backward, beside its weights."""
    torch._dynamo.reset()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode():
        with torch.device("cuda"):
            model = GPT(SHAPE)
            stream_nd = torch.zeros(ROWS * SHAPE.sequence, SHAPE.width, requires_grad=True)
            rotation = (
                model.rotary(torch.zeros(1, SHAPE.sequence, dtype=torch.int64), torch.float32) if model.rotary else None
            )
        layer = model.layers["0"]
        compile_layer_into(layer, recompute, Graphs())
        documents = placed_documents(lengths_of(3))
        rows = Rows(rows=ROWS, tokens=SHAPE.sequence, rotation=rotation, documents=documents, cache=None)
        here = {tensor.untyped_storage()._cdata for tensor in (stream_nd, *layer.parameters())}
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cuda", dtype=torch.bfloat16):
            layer(stream_nd, rows)
        return sum(size for place, size in kept.items() if place not in here)


def graphs_of_steps(recompute: Recompute, packed: Literal["documents", "rows"]) -> list[int]:
    """How many graphs were compiled after each step, of which each has another number of documents."""
    graphs, counts = Graphs(), []
    with FakeTensorMode():
        with torch.device("cuda"):
            model = GPT(SHAPE)
        for layer in model.layers.values():
            compile_layer_into(layer, recompute, graphs)
        for step in range(STEPS):
            take_step(model, lengths_of(step) if packed == "documents" else None)
            counts.append(graphs.count)
    return counts


def compile_layer_into(layer: nn.Module, recompute: Recompute, graphs: Graphs) -> None:
    assert isinstance(layer, Layer)
    if recompute != "none":
        layer.run = layer_runner(execution_of(recompute))
    layer.compile(dynamic=False, fullgraph=True, backend=graphs)


def placed_documents(lengths: tuple[int, ...], longest: int = SHAPE.sequence) -> PlacedDocuments:
    return PlacedDocuments(lengths, of_any_length(cumulative_lengths(lengths).to("cuda")), longest)


def execution_of(recompute: Recompute) -> Execution:
    return Execution(
        arithmetic=RunArithmetic(precision="bf16", compile="blocks", gradient_transfer="float32"),
        layout=Layout(recompute=recompute),
        shape=SHAPE,
        device="cuda",
    )


def lengths_of(step: int) -> tuple[int, ...]:
    """Another number of documents in each step."""
    return (*[1] * step, SHAPE.sequence - step, *[SHAPE.sequence] * (ROWS - 1))


def take_step(model: GPT, lengths: tuple[int, ...] | None) -> None:
    tokens = torch.zeros(ROWS, SHAPE.sequence, dtype=torch.int64, device="cuda")
    for parameter in model.parameters():
        parameter.grad = None
    documents = positions = None
    if lengths:
        positions = torch.zeros(ROWS, SHAPE.sequence, dtype=torch.int64, device="cuda")
        documents = placed_documents(lengths)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        hidden_nd = model(tokens, positions, documents)
        loss = sum_of_losses(hidden_nd, model.head_weight(), tokens.flatten())
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape, name
        assert parameter.grad.device.type == "cuda" and parameter.grad.dtype == torch.float32, name


if __name__ == "__main__":
    sys.exit(main())
