"""Predicts times of arithmetic and messages from a probe's measurements of other sizes.

Between measured sizes rates are averaged with weights that fall with the distance, sizes taken as logarithms; beyond
them the nearest measured rate holds. So nothing is ever expected to run faster than the best that was measured.
All functions take numbers or arrays and answer seconds as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from plait.errors import PlaitError
from plait.machines.measured import CommOperation, LinkScope, MeasuredDevice, MeasuredLink, Measurements, WorkKind
from plait.planner.calibration.constants import constant
from plait.planner.problem.candidates import Reals

Direction = Literal["forward", "backward"]
ProductForm = Literal["forward", "input", "weight"]
_PRODUCT_WORK: dict[ProductForm, WorkKind] = {
    "forward": "product",
    "input": "product_input",
    "weight": "product_weight",
}
_ATTENTION_WORK: dict[Direction, WorkKind] = {"forward": "attention", "backward": "attention_backward"}
_STREAM_WORK: dict[Direction, WorkKind] = {"forward": "stream", "backward": "stream_backward"}
INVERSE_DISTANCE_POWER = constant("neighbour_weight")
"""Power of the distance, in factors of two, with which a measured rate loses weight."""
_LIBRARY_OPERATION: dict[CommOperation, CommOperation] = {"swap_parts": "reduce_scatter", "spread_own": "all_gather"}
"""For GPUs, where a probe measures only the library's own operations: the operation that stands for each of ours."""

WorkAmount = Callable[[Any], Any]
"""A function from sizes to an amount of work; time is about proportional to that amount."""


def measured_product_s(
    device: MeasuredDevice, rows: Any, inner: Any, columns: Any, *, form: ProductForm = "forward"
) -> Reals:
    """Seconds of a product of rows × inner by inner × columns: of a forward pass, or of one of its gradients."""
    once = _interpolated_work_s(device, _PRODUCT_WORK[form], (rows, inner, columns), lambda s: s[0] * s[1] * s[2])
    return np.maximum(once, measured_launch_s(device))


def attention_s(
    device: MeasuredDevice,
    sequences: Any,
    length: Any,
    heads: Any,
    head_width: Any,
    direction: Direction,
) -> Reals:
    """Seconds of one layer's attention over this many sequences, or documents, of a length."""
    work = _ATTENTION_WORK[direction]
    known = [((n.sizes[1], n.sizes[4]), n.seconds / (n.sizes[0] * n.sizes[2])) for n in device.times_of(work)]
    each = _interpolated_s(work, known, (length, head_width), lambda s: s[0] ** 2 * s[1])
    return np.asarray(sequences, dtype=np.float64) * np.asarray(heads, dtype=np.float64) * each


def stream_s(device: MeasuredDevice, tokens: Any, width: Any, ffn: Any, direction: Direction) -> Reals:
    """Seconds of all that one layer does beside products and attention, for a micro-batch of this many tokens.

    A layer reads and writes some 12 numbers a unit of width and 4 a unit of its feedforward, forward as backward.
    """
    once = _interpolated_work_s(
        device, _STREAM_WORK[direction], (tokens, width, ffn), lambda s: s[0] * (12.0 * s[1] + 4.0 * s[2])
    )
    return np.maximum(once, measured_launch_s(device))


def head_s(device: MeasuredDevice, tokens: Any, width: Any, vocabulary: Any) -> Reals:
    """Seconds of the head and the loss, forward and backward: products of 6 FLOPs a weight, and some 200 FLOPs' worth
    of passes for each score."""
    return _interpolated_work_s(
        device, "head", (tokens, width, vocabulary), lambda s: s[0] * s[2] * (6.0 * s[1] + 200.0)
    )


def frozen_head_share(width: int) -> float:
    """Share of head_s if the head is frozen: its gradient, a third of the products, is not computed."""
    return (4.0 * width + 200.0) / (6.0 * width + 200.0)


def logits_share(width: int) -> float:
    """Share of head_s that logits and loss take, without any gradient: a third of the products, half of the rest."""
    return (2.0 * width + 100.0) / (6.0 * width + 200.0)


def frozen_embedding_share(tokens: Any, vocabulary: Any) -> Any:
    """Share of embedding_s if the embedding is frozen: looking tokens up."""
    return tokens / (3.0 * tokens + vocabulary)


def embedding_s(device: MeasuredDevice, tokens: Any, width: Any, vocabulary: Any) -> Reals:
    """Seconds of looking tokens up and of the gradient, a table as large as the embedding."""
    return _interpolated_work_s(device, "embedding", (tokens, width, vocabulary), lambda s: (s[0] * 3.0 + s[2]) * s[1])


def accumulate_s(device: MeasuredDevice, numel: Any) -> Reals:
    """Seconds of adding this many gradients to those of an earlier micro-batch."""
    return _interpolated_work_s(device, "accumulate", (numel,), lambda s: s[0])


def update_s(device: MeasuredDevice, numel: Any) -> Reals:
    """Seconds of the optimizer's update of this many parameters, the gradient's norm included."""
    known = [(one.sizes[:1], one.seconds) for one in device.times_of("update")]
    return _interpolated_s("update", known, (numel,), lambda s: s[0])


def measured_launch_s(device: MeasuredDevice) -> float:
    """Seconds of the smallest operation."""
    return min(one.seconds for one in device.times_of("launch"))


def measured_collective_s(
    measured: Measurements, kind: CommOperation, size_bytes: Any, ranks: Any, scope: LinkScope
) -> Reals:
    """Seconds of one operation on a buffer of this many bytes over this many ranks; 0 for a single rank.

    Time is interpolated over sizes, beyond them at the last rate. Other numbers of ranks than the measured ones take
    those of the nearest, times what a ring sends: 2 (n - 1) / n of the buffer for a sum, (n - 1) / n otherwise, and
    for short messages one more latency for each rank more.
    """
    link = _nearest_measured_link(measured, kind, scope, ranks)
    sizes, ranks = np.asarray(size_bytes, dtype=np.float64), np.asarray(ranks, dtype=np.float64)
    short_s = link.points[0].seconds
    carried = np.maximum(seconds_at_sizes(link, sizes) - short_s, 0.0)
    if kind == "send":
        return short_s + carried
    wires = ((ranks - 1) / np.maximum(ranks, 1)) / ((link.ranks - 1) / link.ranks)
    hops = np.maximum(ranks - 1, 0) / (link.ranks - 1)
    return np.where(ranks > 1, short_s * hops + carried * wires, 0.0)


def measured_message_cpu_s(measured: Measurements, size_bytes: Any, scope: LinkScope) -> Reals:
    """Processor seconds that a rank spends on sending or receiving a message of this many bytes."""
    points = _nearest_measured_link(measured, "send", scope, 2).points
    sizes = np.asarray(size_bytes, dtype=np.float64)
    # The first and shortest message also wakes threads up: none costs more than a longer one.
    spent = np.minimum.accumulate([point.cpu_s for point in points][::-1])[::-1]
    known = np.array([point.bytes for point in points], dtype=np.float64)
    inside = np.exp(np.interp(np.log(np.maximum(sizes, 1.0)), np.log(known), np.log(np.maximum(spent, 1e-9))))
    return inside * np.maximum(sizes / known[-1], 1.0)


def measured_overlap(measured: Measurements, scope: LinkScope) -> float:
    """Share of a sum over ranks that disappears behind arithmetic; 0 where it was not measured."""
    shares = [one.hidden_share for one in measured.overlaps if one.scope == scope]
    return min(shares, default=0.0)


def _interpolated_work_s(device: MeasuredDevice, work: WorkKind, sizes: Sequence[Any], amount: WorkAmount) -> Reals:
    return _interpolated_s(work, [(one.sizes, one.seconds) for one in device.times_of(work)], sizes, amount)


def _interpolated_s(
    work: WorkKind, points: Sequence[tuple[tuple[int, ...], float]], sizes: Sequence[Any], amount: WorkAmount
) -> Reals:
    """Seconds at `sizes` from seconds at known sizes, by rates: amounts of work a second."""
    if not points:
        raise PlaitError(f"{work} was not measured; probe again with plait probe --again")
    requested = np.stack(np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in sizes)))
    places = np.log2(np.array([place for place, _ in points], dtype=np.float64))
    rates = np.log(np.array([amount(place) / seconds for place, seconds in points]))
    at = np.log2(np.maximum(requested, 1.0)).reshape(len(requested), -1).T
    at = np.clip(at, places.min(axis=0), places.max(axis=0))
    squares = ((at[:, None, :] - places[None]) ** 2).sum(axis=2)
    weights = (squares + 1e-9) ** (-INVERSE_DISTANCE_POWER / 2)
    rate = np.exp((weights * rates).sum(axis=1) / weights.sum(axis=1)).reshape(requested.shape[1:])
    return amount(requested) / rate


def _nearest_measured_link(measured: Measurements, kind: CommOperation, scope: LinkScope, ranks: Any) -> MeasuredLink:
    """The measured operation with the nearest number of ranks; the slowest of the links between hosts."""
    of_scope = [link for link in measured.links if link.scope == scope]
    found = [link for link in of_scope if link.kind == kind]
    found = found or [link for link in of_scope if link.kind == _LIBRARY_OPERATION.get(kind)]
    if not found:
        raise PlaitError(f"{kind} {scope} hosts was not measured; probe again with two workers or more there")
    wanted = float(np.max(np.asarray(ranks)))
    nearest = min(abs(np.log2(link.ranks / max(wanted, 2.0))) for link in found)
    near = [link for link in found if abs(np.log2(link.ranks / max(wanted, 2.0))) == nearest]
    return max(near, key=lambda link: link.points[-1].seconds / link.points[-1].bytes)


def seconds_at_sizes(link: MeasuredLink, sizes: Reals) -> Reals:
    """Seconds between measured sizes, on a straight line of logarithms; beyond the last at its rate."""
    known = np.log([point.bytes for point in link.points])
    # Noise may have a longer message end sooner; a plan must not gain by sending more.
    seconds = np.log(np.maximum.accumulate([point.seconds for point in link.points]))
    inside = np.exp(np.interp(np.log(np.maximum(sizes, 1.0)), known, seconds))
    return inside * np.maximum(sizes / np.exp(known[-1]), 1.0)
