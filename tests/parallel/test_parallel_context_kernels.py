"""The kernels of the context strand in one process: pieces of keys join to the whole, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.model.attention import Documents, attend
from plait.parallel.context.cut import WindowBand
from plait.parallel.context.kernels import Kernel, blocked_kernel, kernel_for, merge_results

QUERIES, EARLIER, ROWS, HEADS, WIDTH = 12, 17, 2, 6, 8
KERNELS = {
    "flash": kernel_for(torch.empty(1, 1, 1, WIDTH, dtype=torch.float64)),
    "blocks of one query": blocked_kernel(1),
    "blocks of some": blocked_kernel(5 * ROWS * HEADS * EARLIER),
    "one block": blocked_kernel(2**20),
}


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kv_heads", [1, 3, 6])
def test_square_and_rectangle_join_to_the_end_of_a_causal_row(name: str, kv_heads: int) -> None:
    kernel, tokens = KERNELS[name], EARLIER + QUERIES
    sizes = [(ROWS, tokens, heads, WIDTH) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    q, k, v, grad = tensors(*sizes)
    whole = [x.requires_grad_() for x in (q, k, v)]
    wanted = attend(q, k, v, None)[:, EARLIER:]
    wanted_grads = torch.autograd.grad(wanted, whole, grad[:, EARLIER:])
    own = [x.detach()[:, EARLIER:] for x in whole]
    before = [x.detach()[:, :EARLIER] for x in whole]
    out, total = kernel.forward(own[0], own[1], own[2], "causal")
    merge_results((out, total), kernel.forward(own[0], before[1], before[2], "none"))
    close(out, wanted)
    square = kernel.backward((grad[:, EARLIER:], *own, out, total), "causal")
    rectangle = kernel.backward((grad[:, EARLIER:], own[0], *before[1:], out, total), "none")
    close(square[0] + rectangle[0], wanted_grads[0][:, EARLIER:])
    for number in (1, 2):
        close(torch.cat((rectangle[number], square[number]), dim=1), wanted_grads[number])


@pytest.mark.parametrize("name", KERNELS)
def test_segments_are_documents(name: str) -> None:
    kernel: Kernel = KERNELS[name]
    runs = ((3, 2), (1, 4), (9, 1), (5, 1))
    lengths = tuple(length for length, times in runs for _ in range(times))
    count = sum(lengths)
    q, k, v, grad = tensors((count, 4, WIDTH), (count, 2, WIDTH), (count, 2, WIDTH), (count, 4, WIDTH))
    whole = [x.requires_grad_() for x in (q, k, v)]
    wanted = attend(q[None], k[None], v[None], Documents(lengths))[0]
    wanted_grads = torch.autograd.grad(wanted, whole, grad)
    own = [x.detach() for x in whole]
    out, total = kernel.segments_forward(own[0], own[1], own[2], runs)
    close(out, wanted)
    for found, grad_wanted in zip(kernel.segments_backward((grad, *own, out, total), runs), wanted_grads, strict=True):
        close(found, grad_wanted)


def test_joined_sums_are_those_of_all_keys_in_float32_for_bfloat16() -> None:
    q, k, v = (x.bfloat16() for x in tensors(*[(1, 4, 2, WIDTH)] * 3))
    kernel = kernel_for(q)
    outcome = kernel.forward(q, k[:, :1], v[:, :1], "none")
    merge_results(outcome, kernel.forward(q, k[:, 1:], v[:, 1:], "none"))
    out, total = kernel.forward(q, k, v, "none")
    assert outcome[0].dtype == torch.bfloat16 and outcome[1].dtype == torch.float32
    torch.testing.assert_close(outcome[1], total)
    torch.testing.assert_close(outcome[0], out, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_that_16_bits_cannot_hold_are_exact(dtype: torch.dtype) -> None:
    """Of up to 100,000 before they are divided, where float16 ends at 65,504 and bfloat16 knows each 512th number."""
    drawn = tensors(*[(1, 24, heads, 64) for heads in (4, 2, 2, 4)])
    q, k, v, grad = (x.to(dtype) for x in (drawn[0] / 4 + 40, drawn[1] / 4 + 40, drawn[2], drawn[3]))
    kernel, mask = blocked_kernel(2**20, window=5), WindowBand(shift=0, window=5)
    out, total = kernel.forward(q, k, v, mask)
    wide = [x.double() for x in (q, k, v)]
    wanted, wanted_total = kernel.forward(wide[0], wide[1], wide[2], mask)
    torch.testing.assert_close(total.double(), wanted_total, rtol=1e-6, atol=1e-3)
    found = kernel.backward((grad, q, k, v, out, total), mask)
    expected = kernel.backward((grad.double(), *wide, wanted, wanted_total), mask)
    assert all(x.isfinite().all() for x in found)
    assert max(relative_error(out, wanted), relative_error(found[2], expected[2])) < 0.01


def test_gradients_of_many_blocks_are_added_up_in_float32() -> None:
    drawn = [x.bfloat16() for x in tensors(*[(1, 256, heads, 8) for heads in (2, 1, 1, 2)])]
    q, k, v, grad = drawn
    wide = [x.double() for x in drawn]
    one_query, exact = blocked_kernel(1), blocked_kernel(2**20)
    outcomes = one_query.forward(q, k, v, "causal"), exact.forward(wide[0], wide[1], wide[2], "causal")
    found = one_query.backward((grad, q, k, v, *outcomes[0]), "causal")
    expected = exact.backward((wide[3], wide[0], wide[1], wide[2], *outcomes[1]), "causal")
    errors = [relative_error(one, other) for one, other in zip(found, expected, strict=True)]
    assert max(errors) < 0.008, errors


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
