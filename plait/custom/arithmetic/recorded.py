"""Records the float32 matrix products of a user's step, forward and backward, through torch's dispatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MemoryOrder = Literal["rows", "columns"]
"""A matrix's memory order: by rows, or by columns."""
AND_BACKWARD = 3.5
"""FLOPs of attention forward and backward, in those of its forward pass."""

_FACTORS: Mapping[Any, int] = {
    torch.ops.aten.mm: 0, torch.ops.aten.bmm: 0, torch.ops.aten.addmm: 1, torch.ops.aten.baddbmm: 1,
}  # fmt: skip
"""torch's products, and which argument is the left factor; the right one follows."""
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProduct:
    """Matrices [rows, inner] times [inner, columns]; of a batch this many at once, 0 for a product by itself."""

    matrices: int
    rows: int
    inner: int
    columns: int
    left: MemoryOrder
    right: MemoryOrder

    @property
    def flops(self) -> float:
        return 2.0 * max(1, self.matrices) * self.rows * self.inner * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAttention:
    """torch's attention on processors forward and backward, whose products it computes inside of itself."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    causal: bool
    masked: bool

    @property
    def flops(self) -> float:
        return AND_BACKWARD * 4.0 * self.batch * self.heads * self.queries * self.keys * self.width


RecordedWork = RecordedProduct | RecordedAttention
WorkCounts = Mapping[RecordedWork, int]
"""How often each piece of work occurs in a step."""


class WorkRecorder(TorchDispatchMode):
    """Counts the products of what runs in its block, which runs as it would without it."""

    supports_higher_order_operators = True
    """They run as they are; torch would refuse them in the block."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, which takes seconds, to keep it from this class."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[RecordedWork] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        work = _work_of(getattr(func, "overloadpacket", None), args, options)
        if work is not None:
            self.counts[work] += 1
        return func(*args, **options)


def total_flops(counts: WorkCounts) -> float:
    """FLOPs of all products."""
    return sum(times * work.flops for work, times in counts.items())


def describe_work(counts: WorkCounts) -> list[list[Any]]:
    """The products as JSON values, the same for the same products in any order."""
    return sorted(([type(work).__name__, asdict(work), times] for work, times in counts.items()), key=repr)


def _work_of(packet: Any, args: Sequence[Any], options: Mapping[str, Any]) -> RecordedWork | None:
    if packet in _FACTORS:
        first = _FACTORS[packet]
        left, right = args[first : first + 2]
        return _product(left, right) if left.dtype == right.dtype == torch.float32 and left.numel() else None
    if packet is _ATTENTION and args[0].dtype == torch.float32:
        query, key = args[0], args[1]
        causal = bool(options.get("is_causal", args[4] if len(args) > 4 else False))
        batch, heads, queries, width = query.shape
        return RecordedAttention(
            batch=batch, heads=heads, queries=queries, keys=key.shape[2], width=width, causal=causal,
            masked=options.get("attn_mask") is not None,
        )  # fmt: skip
    return None


def _product(left: Tensor, right: Tensor) -> RecordedProduct:
    return RecordedProduct(
        matrices=left.shape[0] if left.dim() == 3 else 0, rows=left.shape[-2], inner=left.shape[-1],
        columns=right.shape[-1], left=_order(left), right=_order(right),
    )  # fmt: skip


def _order(matrix: Tensor) -> MemoryOrder:
    return "columns" if matrix.stride(-1) != 1 and matrix.stride(-2) == 1 else "rows"
