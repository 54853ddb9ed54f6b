"""What Inductor makes of plait's layers for a GPU: kernels, and the bytes that they read and write.

Run by build.py with described_driver.c. Each layer is lowered and fused as for a card, and nothing is compiled: the
scheduler's kernels are counted and compared with kernels.json, so that a change to a layer that costs a fusion shows.

    kernels.py [--write]   --write puts what was found into kernels.json, for this version of torch
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.model.adapter_shape import AdapterShape
from plait.model.attention import Rows
from plait.model.gpt import GPT
from plait.model.shape import ModelShape, linear_layers
from tests.cuda_build.check import placed_documents

RECORDED = Path(__file__).with_suffix(".json")
GROWTH = 1.005
"""By how much a layer's bytes may grow: a saved row statistic more is no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layer, and how many rows a step gives it."""

    shape: ModelShape
    rows: int


def llama(*, width: int, heads: int, kv_heads: int, ffn: int, sequence: int) -> ModelShape:
    return ModelShape(
        layers=1,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_width=width // heads,
        ffn=ffn,
        vocabulary=512,
        sequence=sequence,
    )


def adapted(shape: ModelShape) -> ModelShape:
    return replace(shape, adapter=AdapterShape(rank=16, alpha=32, targets=linear_layers(shape)))


CASES = {
    "125M": Case(
        rows=32,
        shape=ModelShape(
            layers=1, width=768, heads=12, kv_heads=12, head_width=64, ffn=3072, vocabulary=512, sequence=1024,
            norm="layernorm", activation="gelu", positions="learned", bias="all", tied=True,
        ),
    ),
    "1B": Case(rows=4, shape=llama(width=2048, heads=16, kv_heads=16, ffn=5632, sequence=4096)),
    "7B": Case(rows=2, shape=llama(width=4096, heads=32, kv_heads=8, ffn=11008, sequence=4096)),
    "LoRA 8B": Case(rows=2, shape=adapted(llama(width=4096, heads=32, kv_heads=8, ffn=14336, sequence=2048))),
}  # fmt: skip


@dataclass(slots=True)
class Kernels:
    """A compiler that lowers and fuses a graph, counts the kernels, and runs the graph operation by operation."""

    fused: int = 0
    library: int = 0
    """Products and attention, which libraries compute."""
    nbytes: int = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        return compile_fx.compile_fx(graph, inputs, inner_compile=self._count)

    def _count(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **known: Any) -> Callable[..., Any]:
        compile_fx.view_to_reshape(graph)
        with torch.no_grad():
            mode = compile_fx.fake_tensor_prop(graph, inputs)
        with DebugContext(), V.set_fake_mode(mode):
            compile_fx.record_original_output_strides(graph)
            compile_fx._recursive_post_grad_passes(graph, False)
            lowered = GraphLowering(
                graph, example_inputs=inputs, shape_env=mode.shape_env, is_backward=known.get("is_backward", False)
            )
            with V.set_graph_handler(lowered), V.set_extern_kernel_nodes([]):
                lowered.run(*inputs)
                lowered.init_wrapper_code()
                lowered._update_scheduler()
                for node in lowered.scheduler.nodes:
                    if isinstance(node, NopKernelSchedulerNode):
                        continue
                    if isinstance(node, ExternKernelSchedulerNode):
                        self.library += 1
                    else:
                        self.fused += 1
                    self.nbytes += node.get_read_write_buffers_sizes()
        return make_boxed_func(graph.forward)


def kernels_of(case: Case) -> Kernels:
    """Those of one layer's forward and backward in bf16, over rows of four documents."""
    torch._dynamo.reset()
    found, shape = Kernels(), case.shape
    with FakeTensorMode():
        with torch.device("cuda"):
            model = GPT(shape)
            stream_nd = torch.zeros(case.rows * shape.sequence, shape.width, requires_grad=True)
            places = torch.zeros(case.rows, shape.sequence, dtype=torch.int64)
            rotation = model.rotary(places, torch.float32) if model.rotary else None
        layer = model.layers["0"]
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(shape.adapter is None or "adapter" in name)
        layer.compile(dynamic=False, fullgraph=True, backend=found)
        documents = placed_documents((shape.sequence // 4,) * 4 * case.rows, longest=shape.sequence)
        rows = Rows(rows=case.rows, tokens=shape.sequence, rotation=rotation, documents=documents, cache=None)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            result_nd = layer(stream_nd, rows)
        result_nd.backward(torch.zeros_like(result_nd))
    return found


def main(arguments: list[str]) -> int:
    version = torch.__version__.partition("+")[0]
    recorded: dict[str, dict[str, dict[str, int]]] = json.loads(RECORDED.read_text())
    found = {name: asdict(kernels_of(case)) for name, case in CASES.items()}
    if arguments == ["--write"]:
        recorded[version] = found
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
    elif version not in recorded:
        print(f"kernels.json has nothing of torch {version} to compare with; kernels.py --write records it")
    more = [more_than(one, recorded.get(version, found)[name]) for name, one in found.items()]
    for (name, one), added in zip(found.items(), more, strict=True):
        kernels = f"{one['fused']} fused kernels, {one['library']} of libraries, {one['nbytes'] / 1e9:.2f} GB"
        print("; ".join((f"a layer of {name}: {kernels}", *added)))
    return int(any(more))


def more_than(found: dict[str, int], recorded: dict[str, int]) -> list[str]:
    """What has grown."""
    limits = {**recorded, "nbytes": GROWTH * recorded["nbytes"]}
    return [f"{key} was {recorded[key]}" for key, count in found.items() if count > limits[key]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
