"""Frozen matrices in four (NF4) or eight bits per number, stored as blocks; each rank keeps the blocks that overlap its
part.

Note [blocks of the whole matrix]: a matrix is read row by row, 64 numbers form a block, and the numbers of a block are
multiples of its scale. Blocks, scales and codes depend only on the whole matrix. A rank with a part of it keeps the
whole blocks that enclose the part, so every layout computes with the same numbers, bit for bit, and no layout is
refused.

NF4, its blocks and the second quantization of their scales follow QLoRA (Dettmers et al. 2023), in the byte layout of
bitsandbytes: a byte contains two codes, the first in its upper half; a block's largest magnitude is an eight-bit code
(Dettmers 2015) times the scale of 256 such codes, plus the mean of all. Eight-bit blocks have a float32 scale.

Legend: n blocks, g groups of 256 blocks, o outputs and i inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plait.model.adapter_shape import BLOCK, QUANTIZED_BLOCK_BYTES, Quantization

GROUP = 256
"""Number of blocks whose scales share a scale."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, between -1 and 1 (Dettmers et al. 2023, appendix E)."""
_LARGEST_CODE = 127
_SMALLEST = 1e-30
"""Far below the values of any model, but not a denormal number, which workers flush to zero."""
_BLOCKS_AT_ONCE = {"cpu": 1 << 12}
"""Number of blocks read at a time, so that intermediate results stay in a CPU's cache."""
_BLOCKS_AT_ONCE_ELSEWHERE = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """A whole matrix as blocks."""

    blocks: Tensor
    """[n, bytes] in uint8: the codes of each block, then its scale."""
    scales: Tensor
    """[g + 1] in float32: for NF4 the groups' scales, then the mean of the blocks' scales; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedPart:
    """A rectangle of a matrix [o, i], and the blocks that enclose it: Note [blocks of the whole matrix].

    If blocks end where rows end, the enclosing blocks form a rectangle too; otherwise they are all blocks of the rows.
    """

    quantization: Quantization
    shape: tuple[int, int]
    offset: tuple[int, int]
    extent: tuple[int, int]

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return QUANTIZED_BLOCK_BYTES[self.quantization]

    @property
    def scales(self) -> int:
        """Number of elements of QuantizedMatrix.scales."""
        blocks = -(-self.shape[0] * self.shape[1] // BLOCK)
        return -(-blocks // GROUP) + 1 if self.quantization == "nf4" else 0

    @property
    def blocks(self) -> int:
        """Number of blocks that a rank with this part keeps."""
        rows, columns, _, _ = self._grid()
        return rows * columns

    def _grid(self) -> tuple[int, int, int, int]:
        """The kept blocks as (rows, columns, index of the first in the matrix, distance between rows)."""
        (first, left), (rows, columns), width = self.offset, self.extent, self.shape[1]
        if width % BLOCK:
            begin, end = first * width // BLOCK, -(-(first + rows) * width // BLOCK)
            return 1, end - begin, begin, end - begin
        begin, end = left // BLOCK, -(-(left + columns) // BLOCK)
        return rows, end - begin, first * (width // BLOCK) + begin, width // BLOCK

    def cut(self, matrix: QuantizedMatrix) -> Tensor:
        """This part's blocks, from a whole matrix."""
        rows, columns, first, apart = self._grid()
        size = self.block_bytes
        return matrix.blocks.as_strided((rows, columns, size), (apart * size, size, 1), first * size).reshape(-1, size)

    def runs(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """Kept blocks `first` to `first + count` as ranges of the flattened matrix: (first element, end)."""
        _, columns, begin, apart = self._grid()
        while count > 0:
            row, column = divmod(first, columns)
            together = min(count, columns - column)
            at = begin + row * apart + column
            yield at * BLOCK, min((at + together) * BLOCK, self.shape[0] * self.shape[1])
            first, count = first + together, count - together

    def numbers(self, blocks: Tensor, scales: Tensor, dtype: torch.dtype, first: int = 0) -> Tensor:
        """The numbers [n, 64] of kept blocks, from block `first` on."""
        at_once = _BLOCKS_AT_ONCE.get(blocks.device.type, _BLOCKS_AT_ONCE_ELSEWHERE)
        found = torch.empty(len(blocks), BLOCK, dtype=dtype, device=blocks.device)
        multiply = self._nf4 if self.quantization == "nf4" else self._int8
        for begin in range(0, len(blocks), at_once):
            some = blocks[begin : begin + at_once]
            found[begin : begin + at_once] = multiply(some, scales, first + begin)
        return found

    def matrix(self, blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The part's numbers [o, i], from all of its blocks."""
        rows, columns = self.extent
        numbers = self.numbers(blocks, scales, dtype)
        if self.shape[1] % BLOCK:
            skipped = self.offset[0] * self.shape[1] % BLOCK
            whole = numbers.view(-1)[skipped : skipped + rows * self.shape[1]].view(rows, self.shape[1])
            return whole[:, self.offset[1] : self.offset[1] + columns]
        whole, skipped = numbers.view(rows, -1), self.offset[1] % BLOCK
        return whole if whole.shape[1] == columns else whole[:, skipped : skipped + columns]

    def _nf4(self, blocks: Tensor, scales: Tensor, first: int) -> Tensor:
        """Numbers [n, 64] in float32."""
        pairs, magnitudes = _tables(blocks.device)
        codes = blocks[:, : BLOCK // 2].int().view(-1)
        numbers = torch.index_select(pairs, 0, codes).view(torch.float32).view(-1, BLOCK)
        of_blocks = torch.index_select(magnitudes, 0, blocks[:, BLOCK // 2].int())
        of_blocks = of_blocks * scales[self._groups(first, len(blocks), blocks.device)] + scales[-1]
        return numbers.mul_(of_blocks.unsqueeze(1))

    def _int8(self, blocks: Tensor, scales: Tensor, first: int) -> Tensor:
        numbers = blocks[:, :BLOCK].view(torch.int8).float()
        return numbers.mul_(blocks[:, BLOCK:].contiguous().view(torch.float32))

    def _groups(self, first: int, count: int, device: torch.device) -> Tensor:
        """The group of each kept block, from block `first` on."""
        _, columns, begin, apart = self._grid()
        kept = torch.arange(first, first + count, device=device)
        if columns == apart:
            return (kept + begin) // GROUP
        return (kept // columns * apart + kept % columns + begin) // GROUP


def whole_part(shape: tuple[int, int], quantization: Quantization) -> QuantizedPart:
    """The whole matrix as a part."""
    return QuantizedPart(quantization=quantization, shape=shape, offset=(0, 0), extent=shape)


@torch.no_grad()
def quantize(matrix_oi: Tensor, quantization: Quantization) -> QuantizedMatrix:
    """Quantize a whole float32 matrix on the CPU: the result is the same on every machine."""
    flat = matrix_oi.reshape(-1)
    missing = -len(flat) % BLOCK  # padding copies the matrix
    numbers = (F.pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK)
    blocks = torch.empty(len(numbers), QUANTIZED_BLOCK_BYTES[quantization], dtype=torch.uint8)
    largest = torch.empty(len(numbers))
    for begin in range(0, len(blocks), _BLOCKS_AT_ONCE["cpu"]):
        some = slice(begin, begin + _BLOCKS_AT_ONCE["cpu"])
        largest[some] = numbers[some].abs().amax(dim=1)
        if quantization == "nf4":
            blocks[some, : BLOCK // 2] = _pairs(_codes(numbers[some], largest[some], torch.tensor(NF4)))
        else:
            scales = (largest[some] / _LARGEST_CODE).unsqueeze(1)
            codes = (numbers[some] / scales.clamp(min=_SMALLEST)).round_()
            blocks[some, :BLOCK] = codes.to(torch.int8).view(torch.uint8)
            blocks[some, BLOCK:] = scales.view(torch.uint8)
    if quantization == "int8":
        return QuantizedMatrix(blocks=blocks, scales=torch.empty(0))
    # The order of a sum over threads would differ between machines; NumPy's is fixed.
    mean = torch.tensor(largest.numpy().mean(dtype="float64"), dtype=torch.float32)
    differences = F.pad(largest - mean, (0, -len(largest) % GROUP)).view(-1, GROUP)
    groups = differences.abs().amax(dim=1)
    blocks[:, BLOCK // 2] = _codes(differences, groups, _magnitudes()).view(-1)[: len(blocks)]
    return QuantizedMatrix(blocks=blocks, scales=torch.cat([groups, mean.view(1)]))


@torch.no_grad()
def quantize_in_place(layers: nn.ModuleDict, quantization: Quantization) -> None:
    """Replace the matrices of a model's layers by their values after quantization, which are those that an adapter was
    trained with. The layers have no adapters yet."""
    for matrix in [one for one in layers.parameters() if one.ndim == 2]:
        matrix.copy_(dequantized(matrix.float().cpu(), quantization))


def dequantized(matrix_oi: Tensor, quantization: Quantization) -> Tensor:
    """A whole matrix in float32 after quantization and dequantization."""
    found = quantize(matrix_oi, quantization)
    part = whole_part((matrix_oi.shape[0], matrix_oi.shape[1]), quantization)
    return part.matrix(found.blocks, found.scales, torch.float32)


def _codes(numbers: Tensor, largest: Tensor, table: Tensor) -> Tensor:
    """The nearest entry of a sorted table for each number of a row, divided by the row's largest magnitude."""
    scaled = (numbers * (1 / largest.clamp(min=_SMALLEST)).unsqueeze(1)).clamp_(-1, 1)
    middles = (table[:-1] + table[1:]) / 2
    if len(table) > len(NF4):
        return torch.bucketize(scaled, middles, out_int32=True).to(torch.uint8)
    codes = torch.zeros(scaled.shape, dtype=torch.uint8)
    for middle in middles.tolist():  # takes a sixth of bucketize's time
        codes += scaled > middle
    return codes


def _pairs(codes: Tensor) -> Tensor:
    """Pack two four-bit codes into each byte."""
    return codes[:, ::2] * 16 + codes[:, 1::2]


def _magnitudes() -> Tensor:
    """The 256 numbers of the dynamic eight-bit code (Dettmers 2015): a sign, a power of ten, and a fraction with more
    bits the larger the power."""
    found = [torch.tensor([0.0, 1.0])]
    for power in range(7):
        ends = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32)
        middles = 10 ** (power - 6) * ((ends[:-1] + ends[1:]) / 2)
        found += [middles, -middles]
    return torch.cat(found).sort().values


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The two numbers of each byte of NF4 codes, packed in 64 bits, and the numbers of the dynamic code."""
    table, codes = torch.tensor(NF4), torch.arange(256)
    pairs = torch.stack([table[codes // 16], table[codes % 16]], dim=1).view(torch.int64).view(-1)
    return pairs.to(device), _magnitudes().to(device)


# Products with a quantized matrix. The matrix is dequantized twice, in the forward and in the backward pass: keeping a
# 16-bit copy of all matrices in between would undo the memory saved by quantization.


def read_matrix(blocks: Tensor, dtype: torch.dtype, scales: Tensor, part: QuantizedPart) -> Tensor:
    """The part's numbers, for the forward pass."""
    if not torch.compiler.is_compiling():
        return part.matrix(blocks, scales, dtype)
    return _read_in_graph(blocks, scales, dtype, part.quantization, _place_of(part))


def read_matrix_again(blocks: Tensor, dtype: torch.dtype, scales: Tensor, part: QuantizedPart) -> Tensor:
    """The part's numbers, for the backward pass."""
    if not torch.compiler.is_compiling():
        return part.matrix(blocks, scales, dtype)
    return _read_again_in_graph(blocks, scales, dtype, part.quantization, _place_of(part))


def quantized_product(x: Tensor, blocks: Tensor, bias: Tensor | None, scales: Tensor, part: QuantizedPart) -> Tensor:
    """x @ matrix.T + bias, in autocast's dtype if autocast is on; only `x` gets gradients. Differentiable once."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    x, bias = x.to(dtype), None if bias is None else bias.to(dtype)  # outside, so that autograd casts gradients back
    with torch.autocast(kind, enabled=False):
        result: Tensor = _QuantizedProduct.apply(x, blocks, bias, scales, part)  # type: ignore[assignment]
    return result


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, blocks: Tensor, bias: Tensor | None, scales: Tensor, part: QuantizedPart
    ) -> Tensor:
        ctx.save_for_backward(blocks, scales)
        ctx.part = part
        return F.linear(x, read_matrix(blocks, x.dtype, scales, part), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad,), (blocks, scales) = grads, ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        return grad @ read_matrix_again(blocks, grad.dtype, scales, ctx.part), None, None, None, None


# For compiled layers, as operations that a graph treats as opaque. There are two with the same meaning: if both passes
# used the same operation, a compiler would keep its result in between.


def _place_of(part: QuantizedPart) -> list[int]:
    return [*part.shape, *part.offset, *part.extent]


def _part_at(quantization: str, place: list[int]) -> QuantizedPart:
    rows, columns, top, left, height, width = place
    kind: Quantization = "nf4" if quantization == "nf4" else "int8"
    return QuantizedPart(quantization=kind, shape=(rows, columns), offset=(top, left), extent=(height, width))


@torch.library.custom_op("plait::read_matrix", mutates_args=())
def _read_in_graph(blocks: Tensor, scales: Tensor, dtype: torch.dtype, quantization: str, place: list[int]) -> Tensor:
    return _part_at(quantization, place).matrix(blocks, scales, dtype).contiguous()


@torch.library.custom_op("plait::read_matrix_again", mutates_args=())
def _read_again_in_graph(
    blocks: Tensor, scales: Tensor, dtype: torch.dtype, quantization: str, place: list[int]
) -> Tensor:
    return _part_at(quantization, place).matrix(blocks, scales, dtype).contiguous()


@_read_in_graph.register_fake
@_read_again_in_graph.register_fake
def _unread(blocks: Tensor, scales: Tensor, dtype: torch.dtype, quantization: str, place: list[int]) -> Tensor:
    return blocks.new_empty((place[4], place[5]), dtype=dtype)
