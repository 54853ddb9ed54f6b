"""What one device computes: attention in documents and in pieces, the loss in pieces, compiled layers, precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch._dynamo.testing import CompileCounterWithBackend

from plait.layout import Layout, Recompute
from plait.model.attention import Documents, attend
from plait.model.gpt import GPT, Layer
from plait.model.init import initialize
from plait.model.matmul import select_matmul_precision
from plait.model.shape import ModelShape
from plait.model.sizes import explicit_shape
from plait.parallel.context.kernels import kernel_for, merge_results
from plait.parallel.recompute import layer_runner
from plait.partition.execution import Execution, RunArithmetic
from plait.probing.arithmetic import arithmetic_runs
from plait.probing.request import model_probe_request
from plait.probing.timing import SingleRank, TimingSetup, WallClock, event_clock, time_in_rounds
from plait.trainer.loss import sum_of_losses

SHAPE = ModelShape(layers=2, width=64, heads=4, kv_heads=2, head_width=16, ffn=128, vocabulary=96, sequence=64)
ROWS, STEPS, STEPS_WITH_NEW_GRAPHS = 2, 12, 10
LENGTHS = (20, 44, 1, 63)
BF16_ERROR = 3e-2
"""Of tensors whose numbers are near one: some roundings to 8 bits."""


def drawn(device: torch.device, *sizes: int, seed: int = 5) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(device)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_documents_are_attended_to_apart(device: torch.device) -> None:
    """By the flash kernel for lengths on a GPU; forward and backward, heads that share keys."""
    heads = (4, 2, 2)
    q, k, v = (drawn(device, ROWS, 64, some, 16, seed=some + n).requires_grad_() for n, some in enumerate(heads))
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).view(ROWS, 64).to(device)
    documents = Documents(LENGTHS).on(device, longest=64, positions_bt=positions)
    found = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), documents)
    parts = (x.flatten(0, 1).split(list(LENGTHS)) for x in (q, k, v))
    alone = [
        attend(a[None].double(), b[None].double(), c[None].double(), None)[0] for a, b, c in zip(*parts, strict=True)
    ]
    wanted = torch.cat(alone).view(found.shape)
    assert relative_error(found, wanted) < BF16_ERROR
    grad = drawn(device, *found.shape, seed=9)
    for one, other in zip(
        torch.autograd.grad(found, (q, k, v), grad.bfloat16()),
        torch.autograd.grad(wanted, (q, k, v), grad.double()),
        strict=True,
    ):
        assert relative_error(one, other) < BF16_ERROR


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [0, 10])
def test_capped_scores_and_sinks_are_those_of_float64(device: torch.device, dtype: torch.dtype, window: int) -> None:
    """In documents, with scores so large that 16 bits would round them to halves."""
    q, k, v, grad = (drawn(device, ROWS, 64, heads, 16, seed=n).to(dtype) for n, heads in enumerate((4, 2, 2, 4)))
    sinks, positions = drawn(device, 4, seed=7), torch.cat([torch.arange(length) for length in LENGTHS])
    documents = Documents(LENGTHS).on(device, longest=64, positions_bt=positions.view(ROWS, 64).to(device))
    found, wanted = list[Tensor](), list[Tensor]()
    for numbers, results in ((dtype, found), (torch.float64, wanted)):
        leaves = [x.to(numbers).requires_grad_() for x in (q * 8, k * 8, v)]
        leaves.append(sinks.to(torch.promote_types(numbers, torch.float32)).requires_grad_())
        mixed = attend(leaves[0], leaves[1], leaves[2], documents, window, 50.0, leaves[3])
        results += [mixed, *torch.autograd.grad(mixed, leaves, grad.to(numbers))]
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) < (1e-4 if dtype == torch.float32 else BF16_ERROR)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pieces_of_keys_join_to_the_whole(device: torch.device, dtype: torch.dtype) -> None:
    """The context strand's kernels, in one process: forward, and backward of each piece with the whole's logsumexp."""
    allowed = BF16_ERROR if dtype == torch.bfloat16 else 1e-5
    q, k, v, grad = (drawn(device, ROWS, 64, heads, 16, seed=n).to(dtype) for n, heads in enumerate((4, 2, 2, 4)))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = attend(leaves[0], leaves[1], leaves[2], None)
    wanted_grads = torch.autograd.grad(wanted, leaves, grad.double())
    kernel, half = kernel_for(q), 32
    out, total = kernel.forward(q[:, half:], k[:, half:], v[:, half:], "causal")
    merge_results((out, total), kernel.forward(q[:, half:], k[:, :half], v[:, :half], "none"))
    assert relative_error(out, wanted[:, half:]) < allowed
    square = kernel.backward((grad[:, half:], q[:, half:], k[:, half:], v[:, half:], out, total), "causal")
    rectangle = kernel.backward((grad[:, half:], q[:, half:], k[:, :half], v[:, :half], out, total), "none")
    assert relative_error(square[0] + rectangle[0], wanted_grads[0][:, half:]) < allowed
    for number in (1, 2):
        assert relative_error(square[number], wanted_grads[number][:, half:]) < allowed


def test_the_loss_in_pieces_is_the_loss(device: torch.device) -> None:
    hidden, head = drawn(device, 128, 64).requires_grad_(), drawn(device, 96, 64, seed=6).requires_grad_()
    targets = torch.randint(0, 96, (128,), generator=torch.Generator().manual_seed(7)).to(device)
    targets[::5] = -100
    found = sum_of_losses(hidden, head, targets)
    wanted = F.cross_entropy(F.linear(hidden.double(), head.double()), targets, reduction="sum")
    assert relative_error(found, wanted) < 1e-5
    for one, other in zip(*(torch.autograd.grad(x, (hidden, head)) for x in (found, wanted)), strict=True):
        assert relative_error(one, other) < 1e-4


def compiler_for(device: torch.device) -> CompileCounterWithBackend:
    """The run's own compiler on a GPU; on a processor, where plait never compiles, one that needs no C++ compiler."""
    backend: Any = "inductor" if device.type == "cuda" else aot_eager_decomp_partition
    return CompileCounterWithBackend(backend)


def attend_rows(q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, documents: Documents | None, window: int) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_bthd, k_bthd, v_bthd))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def model_on(device: torch.device, recompute: Recompute, compiler: Callable[..., Any] | None) -> GPT:
    model = GPT(SHAPE)
    initialize(model, 1)
    execution = Execution(
        arithmetic=RunArithmetic(precision="bf16", compile="blocks", gradient_transfer="float32"),
        layout=Layout(recompute=recompute),
        shape=SHAPE,
        device="cuda" if device.type == "cuda" else "cpu",
    )
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        if device.type == "cpu":  # its own attention asks for the library, outside of a graph
            layer.attention.attend = attend_rows
        if recompute != "none":
            layer.run = layer_runner(execution)
        if compiler is not None:
            layer.compile(dynamic=False, fullgraph=True, backend=compiler)
    return model.to(device)


def gradients_of(model: GPT, device: torch.device, step: int) -> list[Tensor]:
    lengths = (*[1] * step, 64 - step, *[64] * (ROWS - 1))
    tokens = torch.randint(0, 96, (ROWS, 64), generator=torch.Generator().manual_seed(step)).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths]).view(ROWS, 64).to(device)
    model.zero_grad()
    documents = Documents(lengths) if device.type == "cuda" else None
    with torch.autocast(device.type, dtype=torch.bfloat16):
        hidden_nd = model(tokens, positions, documents)
        loss = sum_of_losses(hidden_nd, model.head_weight(), tokens.flatten())
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_layers_compute_the_same_in_two_graphs(device: torch.device, recompute: Recompute) -> None:
    """Whatever the number of documents: no graph break, at most two graphs, none after step 10."""
    counter = compiler_for(device)
    compiled, plain = model_on(device, recompute, counter), model_on(device, "none", None)
    counts = []
    for step in range(STEPS):
        pairs = zip(gradients_of(compiled, device, step), gradients_of(plain, device, step), strict=True)
        assert max(relative_error(found, wanted) for found, wanted in pairs) < 2 * BF16_ERROR
        counts.append(counter.frame_count)
    assert counts[-1] <= 2 and counts[-1] == counts[STEPS_WITH_NEW_GRAPHS - 1]


def test_products_are_as_exact_as_the_plan_says(device: torch.device) -> None:
    """float32 is float32; TF32, where a plan asks for it on a GPU, rounds factors to 10 bits."""
    a, b = drawn(device, 256, 256), drawn(device, 256, 256, seed=6)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        select_matmul_precision("float32")
        assert relative_error(a @ b, a.double() @ b.double()) < 1e-6
        select_matmul_precision("tf32")
        error = relative_error(a @ b, a.double() @ b.double())
        has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        assert 1e-5 < error < 1e-2 if has_tf32 else error < 1e-6
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_a_probe_times_what_the_run_computes(device: torch.device) -> None:
    """On a GPU compiled layers, by the device's own marks: a short kernel takes microseconds, not a look's length."""
    shape, kind = explicit_shape(layers=2, width=64, vocabulary=96, sequence=64), device.type
    assert kind in ("cpu", "cuda")
    request = model_probe_request(
        shape, sequence=64, sequences=2, device="cuda" if kind == "cuda" else "cpu", precision="bf16", threads=1
    )
    request = replace(request, compile="blocks" if kind == "cuda" else "off", products=request.products[:1])
    clock = event_clock(torch.device("cuda"), 60.0) if kind == "cuda" else WallClock()
    runs = arithmetic_runs(request, device)
    wanted = {key: run for key, run in runs.items() if key[0] in ("layer", "layer_backward", "launch")}
    found = time_in_rounds(wanted, TimingSetup(device=device, clock=clock, lockstep=SingleRank()), seconds=0.1)
    assert all(1e-7 < figure.seconds < 1 for figure in found.values())
    assert found["launch", ()].seconds < (5e-5 if kind == "cuda" else 1e-3)
