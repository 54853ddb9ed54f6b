"""Compiled layers: as few graphs as there are shapes, also with documents and where layers are computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.layout import Layout, Recompute
from plait.model.attention import Documents, Rows, attend_ragged, cumulative_lengths, of_any_length
from plait.model.gpt import GPT
from plait.model.init import initialize
from plait.model.shape import ModelShape
from plait.parallel.recompute import layer_runner
from plait.planner.plan import Plan
from tests.counted_graphs import CountedGraphs
from tests.matrix import slow
from tests.trainer.tiny import make_tiny

SHAPE = ModelShape(layers=2, width=32, heads=4, kv_heads=2, head_width=8, ffn=48, vocabulary=50, sequence=32)
ROWS = 2
STEPS = 12
STEPS_WITH_NEW_GRAPHS = 10


@pytest.fixture(autouse=True)
def no_graphs_from_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return make_tiny(tmp_path_factory.mktemp("compiled"))[1]


def lengths_of(step: int) -> tuple[int, ...]:
    """Another number of documents in each step."""
    first = tuple([1] * step + [SHAPE.sequence - step])
    return (*first, *[SHAPE.sequence] * (ROWS - 1))


def ragged(q_nhd: Tensor, k_nhd: Tensor, v_nhd: Tensor, ends: Tensor, *_: Any, window_size: tuple[int, int]) -> Tensor:
    """What the GPU's kernel computes, in torch 2.11's form: no grouped heads."""
    assert q_nhd.shape == k_nhd.shape and window_size == (-1, 0)
    places = torch.arange(len(q_nhd))
    document = torch.searchsorted(ends, places.to(ends.dtype), right=True)
    seen = (document[:, None] == document[None]) & (places[:, None] >= places[None])
    q_hnd, k_hnd, v_hnd = (x.transpose(0, 1) for x in (q_nhd, k_nhd, v_nhd))
    return F.scaled_dot_product_attention(q_hnd, k_hnd, v_hnd, attn_mask=seen).transpose(0, 1)


def ragged_by_groups(*tensors: Any, window_size: tuple[int, int], enable_gqa: bool = False) -> Tensor:
    """The same in later versions' form."""
    q_nhd, k_nhd, v_nhd, *rest = tensors
    assert enable_gqa == (q_nhd.shape[1] != k_nhd.shape[1])
    sharing = q_nhd.shape[1] // k_nhd.shape[1]
    k_nhd, v_nhd = (x.repeat_interleave(sharing, dim=1) for x in (k_nhd, v_nhd))
    return ragged(q_nhd, k_nhd, v_nhd, *rest, window_size=window_size)


def attend_on_gpu(q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, documents: Documents | None, window: int) -> Tensor:
    assert documents is not None and documents.ends is not None
    return attend_ragged(ragged, q_bthd, k_bthd, v_bthd, documents.ends, documents.longest, window)


def with_ends(lengths: tuple[int, ...]) -> Documents:
    """Documents as they are on a GPU."""
    return Documents(lengths, of_any_length(cumulative_lengths(lengths)), SHAPE.sequence)


def model_with(plan: Plan, what: Recompute) -> GPT:
    model = GPT(SHAPE)
    initialize(model, 1)
    for layer in model.layers.values():
        layer.attention.attend = attend_on_gpu  # type: ignore[union-attr]
        if what != "none":
            layer.run = layer_runner(
                replace(plan, placement=replace(plan.placement, layout=Layout(recompute=what))).execution
            )  # type: ignore[assignment]
    return model


def step_of(model: GPT, step: int) -> list[Tensor]:
    lengths = lengths_of(step)
    tokens = torch.randint(0, 50, (ROWS, SHAPE.sequence), generator=torch.Generator().manual_seed(step))
    positions = torch.cat([torch.arange(length) for length in lengths]).view(ROWS, SHAPE.sequence)
    for parameter in model.parameters():
        parameter.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden_nd = model(tokens, positions, with_ends(lengths))
    hidden_nd.float().square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("what", ["none", slow("full"), slow("selective")])
def test_each_new_number_of_documents_meets_the_same_graph(plan: Plan, what: Recompute) -> None:
    compiled, plain, graphs = model_with(plan, what), model_with(plan, "none"), CountedGraphs()
    for layer in compiled.layers.values():
        layer.compile(dynamic=False, fullgraph=True, backend=graphs)
    counts = []
    for step in range(STEPS):
        found, wanted = step_of(compiled, step), step_of(plain, step)
        counts.append(graphs.count)
        scale = max(float(each.abs().max()) for each in wanted)
        for one, other in zip(found, wanted, strict=True):
            assert float((one - other).abs().max()) < 2e-2 * scale
    # One layer without documents' borders, one with: all layers are one function.
    assert counts[-1] <= 2 and counts[-1] == counts[STEPS_WITH_NEW_GRAPHS - 1]


@pytest.mark.parametrize("kernel", [ragged, ragged_by_groups])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads_attend_in_documents_with_any_torch(kernel: Callable[..., Any], kv_heads: int) -> None:
    heads = (4, kv_heads, kv_heads)
    q, k, v = (torch.randn(2, 8, some, 4, generator=torch.Generator().manual_seed(some)) for some in heads)
    lengths = (3, 5, 8)
    found = attend_ragged(kernel, q, k, v, cumulative_lengths(lengths), 8)
    parts = [x.flatten(0, 1).split(list(lengths)) for x in (q, k, v)]
    wanted = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in each), is_causal=True, enable_gqa=True)
        for each in zip(*parts, strict=True)
    ]
    torch.testing.assert_close(found.flatten(0, 1), torch.cat(wanted, dim=1).transpose(0, 1))


def test_a_compiled_layer_keeps_rounded_copies_of_its_weights(plan: Plan) -> None:
    """As memory forecasts of 16-bit runs count them (planner/memory)."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    model = model_with(plan, "none")
    layer: nn.Module = model.layers["0"]
    layer.compile(dynamic=False, backend=CountedGraphs())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step_of(model, 0)
    sizes = [each.numel() for each in kept if each.dtype == torch.bfloat16]
    assert {p.numel() for p in layer.parameters() if p.dim() == 2} <= set(sizes)


@pytest.mark.parametrize("precision", [slow("bf16"), slow("float32")])
def test_a_compiled_layer_keeps_less_the_more_it_computes_again(plan: Plan, precision: str) -> None:
    """Selective recomputing keeps the results of products and of attention, and nothing beside them."""
    kept = {what: kept_per_layer(plan, what, precision) for what in ("none", "selective", "full")}
    sizes = {what: sum(tensor.numel() * tensor.element_size() for tensor in tensors) for what, tensors in kept.items()}
    assert sizes["selective"] < 0.75 * sizes["none"] and sizes["full"] < 0.1 * sizes["selective"]
    tokens, width, kv_width = ROWS * SHAPE.sequence, SHAPE.width, SHAPE.kv_heads * SHAPE.head_width
    # q, k, v, attention's own result and o, gate and up; down's is no part of any gradient.
    products = tokens * (3 * width + 2 * kv_width + 2 * SHAPE.ffn)
    rounded = torch.bfloat16 if precision == "bf16" else torch.float32
    assert sum(tensor.numel() for tensor in kept["selective"] if tensor.dtype == rounded) <= 1.1 * products


def kept_per_layer(plan: Plan, what: Recompute, precision: str) -> list[Tensor]:
    """What one compiled layer saves for backward, beside its input and its weights."""
    torch._dynamo.reset()
    model = model_with(plan, what)
    layer, kept = model.layers["0"], dict[int, Tensor]()
    layer.compile(dynamic=False, fullgraph=True, backend=CountedGraphs())
    stream_nd = torch.randn(ROWS * SHAPE.sequence, SHAPE.width, requires_grad=True)
    here = {x.untyped_storage().data_ptr() for x in (stream_nd, *layer.parameters())}
    lengths = (SHAPE.sequence,) * ROWS
    assert model.rotary is not None
    rotation = model.rotary(torch.arange(SHAPE.sequence)[None], torch.float32)
    rows = Rows(rows=ROWS, tokens=SHAPE.sequence, rotation=rotation, documents=with_ends(lengths), cache=None)

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in here:
            kept[place] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"),
    ):
        layer(stream_nd, rows)
    return list(kept.values())


@pytest.mark.slow
@pytest.mark.parametrize("what", [slow("none"), "full", slow("selective")])
def test_float32_documents_on_gpus_are_no_reason_to_compile_anew(plan: Plan, what: Recompute) -> None:
    """Without 16 bits there is no kernel for lengths: each document is attended to alone, outside the graphs."""
    graphs, model, plain = CountedGraphs(), GPT(SHAPE), GPT(SHAPE)
    for each in (model, plain):
        initialize(each, 1)
    for layer in model.layers.values():
        if what != "none":
            layer.run = layer_runner(
                replace(plan, placement=replace(plan.placement, layout=Layout(recompute=what))).execution
            )  # type: ignore[assignment]
        layer.compile(dynamic=False, backend=graphs)
    counts = []
    for step in range(STEPS):
        documents = with_ends(lengths_of(step))
        tokens = torch.randint(0, 50, (ROWS, SHAPE.sequence), generator=torch.Generator().manual_seed(step))
        positions = torch.arange(SHAPE.sequence).expand(ROWS, -1)
        found, wanted = (each(tokens, positions, documents) for each in (model, plain))
        torch.testing.assert_close(found, wanted)
        for each, output in ((model, found), (plain, wanted)):
            each.zero_grad()
            output.square().sum().backward()
        found, wanted = ([one.grad for one in each.parameters() if one.grad is not None] for each in (model, plain))
        for one, other in zip(found, wanted, strict=True):
            assert float((one - other).norm()) < 1e-4 * float(other.norm())
        counts.append(graphs.count)
    assert counts[-1] <= 6 and counts[-1] == counts[2]
