"""Blocks of few bits: the bytes that bitsandbytes writes, the same numbers for every part, and products that keep no
matrix."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from plait.model.adapter_shape import AdapterShape, Quantization
from plait.model.linear import Linear
from plait.model.quantization import (
    QuantizedPart,
    dequantized,
    quantize,
    quantized_product,
    read_matrix,
    whole_part,
)

Rectangle = tuple[tuple[int, int], tuple[int, int]]
KINDS: tuple[Quantization, ...] = ("nf4", "int8")


def drawn(*sizes: int, seed: int = 5) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_nf4_is_in_the_bytes_of_bitsandbytes() -> None:
    """Digests of what bitsandbytes 0.50.2 made of this matrix by quantize_4bit(blocksize=64, compress_statistics=True,
    quant_type="nf4"): the packed codes, then the codes of the blocks' scales."""
    found = quantize(drawn(100, 37), "nf4")
    codes = found.blocks[:, :32].reshape(-1)[: 100 * 37 // 2].contiguous().numpy().tobytes()
    scales = found.blocks[:, 32].contiguous().numpy().tobytes()
    assert [sha256(one).hexdigest()[:16] for one in (codes, scales)] == ["e37dbd6a6667bf64", "d2d233722440bb16"]
    assert found.scales.tolist() == pytest.approx([0.018065765500068665, 0.05110172927379608], rel=1e-6)


@pytest.mark.parametrize(("kind", "off"), [("nf4", 0.16), ("int8", 0.005)])
def test_a_number_is_off_by_at_most_half_a_step_of_its_block(kind: Quantization, off: float) -> None:
    matrix = drawn(64, 128)
    largest = matrix.view(-1, 64).abs().amax(dim=1, keepdim=True)
    errors = (dequantized(matrix, kind) - matrix).view(-1, 64).abs() / largest
    assert off / 2 < errors.max() < off
    assert torch.equal(dequantized(torch.zeros(3, 50), kind), torch.zeros(3, 50))


RECTANGLES: dict[str, tuple[tuple[int, int], Rectangle]] = {
    "whole": ((100, 37), ((0, 0), (100, 37))),
    "rows through blocks": ((100, 37), ((3, 0), (41, 37))),
    "columns of ragged rows": ((100, 37), ((3, 5), (41, 20))),
    "rows": ((600, 192), ((301, 0), (299, 192))),
    "columns between blocks": ((600, 192), ((0, 64), (600, 128))),
    "columns through blocks": ((600, 192), ((17, 96), (500, 96))),
    "a corner": ((600, 192), ((599, 191), (1, 1))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECTANGLES)
def test_a_part_has_the_numbers_of_the_whole(name: str, kind: Quantization) -> None:
    shape, ((top, left), (rows, columns)) = RECTANGLES[name]
    matrix = drawn(*shape)
    found, wanted = quantize(matrix, kind), dequantized(matrix, kind)
    part = QuantizedPart(quantization=kind, shape=shape, offset=(top, left), extent=(rows, columns))
    blocks = part.cut(found)
    assert blocks.shape == (part.blocks, part.block_bytes) and len(found.scales) == part.scales
    own = part.matrix(blocks, found.scales, torch.float32)
    assert torch.equal(own, wanted[top : top + rows, left : left + columns])
    # As ranks that split the blocks hold them.
    ends = [0, part.blocks // 3, part.blocks]
    for first, end in pairwise(ends):
        numbers = part.numbers(blocks[first:end], found.scales, torch.float32, first).view(-1)
        runs = list(part.runs(first, end - first))
        flat = torch.cat([wanted.view(-1)[a:b] for a, b in runs]) if runs else torch.empty(0)
        assert torch.equal(numbers[: len(flat)], flat) and len(numbers) - len(flat) < 64


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 4])
def test_products_are_those_with_the_dequantized_matrix_bit_for_bit(kind: Quantization, rank: int, bias: bool) -> None:
    adapter = AdapterShape(rank=rank, alpha=8.0, targets=("attention.q",)) if rank else None
    plain, packed = (Linear(70, 50, bias=bias, adapter=adapter) for _ in range(2))
    for layer in (plain, packed):
        layer.weight.requires_grad_(False)
        for seed, one in enumerate(p for p in layer.parameters() if p.requires_grad):
            one.data = drawn(*one.shape, seed=seed)
            one.requires_grad_(one.ndim == 2)
    matrix = drawn(50, 70)
    found = quantize(matrix, kind)
    plain.weight.data = dequantized(matrix, kind)
    packed.quantize(whole_part((50, 70), kind))
    assert packed.scales is not None
    packed.weight.data, packed.scales = found.blocks, found.scales
    results = []
    for layer in (plain, packed):
        x = drawn(9, 70, seed=7).requires_grad_()
        layer(x).square().sum().backward()
        assert layer.weight.grad is None
        results.append([x.grad, *(p.grad for p in layer.parameters() if p.requires_grad)])
    for one, other in zip(*results, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_no_matrix_is_kept_for_the_backward_pass() -> None:
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    layer = Linear(256, 512, bias=False, adapter=AdapterShape(rank=2, alpha=2.0, targets=("attention.q",)))
    layer.quantize(whole_part((512, 256), "nf4"))
    found = quantize(drawn(512, 256), "nf4")
    layer.weight.data, layer.scales = found.blocks, found.scales
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(drawn(3, 256).requires_grad_())
    assert found.blocks.nbytes in kept and max(kept) == found.blocks.nbytes == 512 * 256 // 64 * 33


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiler_sees_two_operations_and_keeps_no_matrix(kind: Quantization) -> None:
    found, part = quantize(drawn(64, 192), kind), whole_part((64, 192), kind)

    def product(x: Tensor) -> Tensor:
        return quantized_product(x, found.blocks, None, found.scales, part).sin()

    results = []
    for run in (product, torch.compile(product, backend="aot_eager", fullgraph=True)):
        x = drawn(5, 192).requires_grad_()
        run(x).sum().backward()
        results.append(x.grad)
    assert results[0] is not None and results[1] is not None and torch.equal(results[0], results[1])


def test_parts_are_read_in_any_dtype() -> None:
    found, part = quantize(drawn(64, 64), "nf4"), whole_part((64, 64), "nf4")
    exact = read_matrix(found.blocks, torch.float32, found.scales, part)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(read_matrix(found.blocks, dtype, found.scales, part), exact.to(dtype))
    upper = replace(part, extent=(32, 64))
    assert torch.equal(upper.matrix(upper.cut(found), found.scales, torch.float32), exact[:32])
