"""`tensor` (TP): each rank has some heads, some of the feed-forward's width and some vocabulary entries of every layer.

The first products of attention and feed-forward (q, k, v; gate, up) give each rank its own columns for all tokens, the
last ones (o, down) an addend of all columns; in between there is no communication. The stream around them is split by
rows, and with it norms and additions (Korthikanti et al. 2022, arXiv 2205.05198). What a rank holds of
each weight is said in partition/boxes.py. A weight that all ranks hold, such as a norm's, is applied to other rows on
each: its gradient is a part of the sum, and replicate.py adds the parts: Note [same box, same sum] in
partition/boxes.py.

Legend: n all rows of the stream, m those of one rank, d elements of a row, b rows of the batch, t tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from plait.layout import equal_share
from plait.model.attention import Attention, Rows
from plait.model.delta_attention import DeltaAttention
from plait.model.feedforward import FeedForward
from plait.model.gpt import GPT, Embedding, Layer, joined_layer_inputs
from plait.model.latent_attention import LatentAttention
from plait.model.linear import Around, Linear, Multiply, to_compute_precision
from plait.model.mixture import Mixture
from plait.model.names import ADAPTER_A
from plait.model.shape import ModelShape
from plait.parallel.collectives import SPREAD_TAG, SUM_TAG, all_gather, reduce_scatter, spread_own, sum_parts
from plait.parallel.compile import outside_graphs
from plait.parallel.sharded_model import ShardedModel
from plait.parallel.watched import WATCH
from plait.partition.boxes import cut_box, kv_heads_of
from plait.partition.execution import Execution


def tensor(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Cut every weight to this rank's part and let the ranks of the axis compute together. Every rank must call it.

    The loss is known to all of them, and the first one reports it.
    """
    if mesh["tensor"].size() == 1:
        return sharded
    stream = sequence_split(mesh.get_group("tensor"))
    # Its collectives belong to no graph.
    gather, scatter = (outside_graphs(one, execution.arithmetic.compile) for one in (stream.gather, stream.scatter))
    stream = replace(stream, gather=gather, scatter=scatter)
    for chunk in sharded.chunks:
        cut_weights(chunk, stream.parts, stream.index)
        split_layers(chunk, stream)
    first = stream.index == 0
    return replace(
        sharded,
        vocabulary=SharedVocabulary(execution.shape, stream),
        reports=sharded.reports and first,
        reports_objectives=first,
    )


def cut_weights(chunk: GPT, parts: int, index: int) -> None:
    """Replace every weight by the rectangle of it that rank `index` of `parts` holds."""
    for name, weight in list(chunk.named_parameters()):
        box = cut_box(name, chunk.shape, parts, index)
        assert box.shape == weight.shape, f"{name} was cut before"
        kept = weight.detach()
        for dim, (first, length) in enumerate(zip(box.offset, box.extent, strict=True)):
            kept = kept.narrow(dim, first, length)
        path, _, last = name.rpartition(".")
        if last == ADAPTER_A and isinstance(layer := chunk.get_submodule(path), Linear):
            layer.first_input = box.offset[1]
        chunk.get_submodule(path).register_parameter(
            last, nn.Parameter(kept.clone(memory_format=torch.contiguous_format), requires_grad=weight.requires_grad)
        )


def split_layers(chunk: GPT, stream: SequenceSplit) -> None:
    """Gather all rows before what the ranks compute together in a layer, and scatter the sum after it."""
    if chunk.embed is not None:
        chunk.add_module("embed", SharedEmbedding(chunk.embed, chunk.shape, stream))
    for layer in chunk.layers.values():
        assert isinstance(layer, Layer)
        if isinstance(layer.attention, DeltaAttention):
            split_delta_attention(layer.attention, stream)
        elif isinstance(layer.attention, LatentAttention):
            split_latent_attention(layer.attention, stream)
        else:
            split_attention(layer.attention, chunk.shape.at(layer.attention.layer), stream)
        if isinstance(layer.feedforward, Mixture):
            split_mixture(layer.feedforward, stream)
        else:
            split_feedforward(layer.feedforward, stream)


def split_attention(attention: Attention, shape: ModelShape, stream: SequenceSplit) -> None:
    """Attention takes and gives this rank's rows of the stream, and computes its own heads of all tokens."""

    def gather(_: nn.Module, arguments: tuple[Tensor, Rows]) -> tuple[Tensor, Rows]:
        x_md, rows = arguments
        return stream.gather(to_compute_precision(x_md), rows.rows * rows.tokens), rows

    attention.register_forward_pre_hook(gather)
    attention.o.around = with_all_reduce(stream)
    places = kv_places(shape, stream.parts, stream.index)
    if places is not None:
        for linear in [one for one in (attention.k, attention.v) if one is not None]:
            linear.around = with_repeated_heads(places, shape.head_width)


def split_delta_attention(attention: DeltaAttention, stream: SequenceSplit) -> None:
    """Delta attention takes and gives this rank's rows of the stream, and computes its own heads of all tokens."""

    def gather(_: nn.Module, arguments: tuple[Tensor, Rows]) -> tuple[Tensor, Rows]:
        x_md, rows = arguments
        return stream.gather(to_compute_precision(x_md), rows.rows * rows.tokens), rows

    attention.register_forward_pre_hook(gather)
    attention.delta_o.around = with_all_reduce(stream)


def split_latent_attention(attention: LatentAttention, stream: SequenceSplit) -> None:
    """Split latent attention: each rank makes those of its own rows, all ranks gather them, and each computes its own
    heads of all tokens. So what stands before heads is computed once, and its gradients are sums of rows' parts."""
    attention.gather = stream.gather
    attention.o.around = with_all_reduce(stream)


def split_feedforward(feedforward: FeedForward, stream: SequenceSplit) -> None:
    """The feed-forward half takes and gives this rank's rows, and computes its part of the width for all rows."""

    def gather(_: nn.Module, arguments: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        x_md, noise_n = arguments
        return stream.gather(to_compute_precision(x_md), len(x_md) * stream.parts), noise_n

    feedforward.register_forward_pre_hook(gather)
    feedforward.down.around = with_all_reduce(stream)


def split_mixture(mixture: Mixture, stream: SequenceSplit) -> None:
    """Experts take and give this rank's rows; each rank routes all rows, and computes its part of every expert's width.

    The first rank answers for counts and balance losses: all ranks see the same tokens. Rows are gathered as the norm
    gives them, for the router rounds nothing.
    """

    def gather(_: nn.Module, arguments: tuple[Tensor, Rows]) -> tuple[Tensor, Rows]:
        x_md, rows = arguments
        return stream.gather(x_md, rows.rows * rows.tokens), rows

    mixture.register_forward_pre_hook(gather)
    mixture.finish = stream.scatter
    mixture.experts.down_bias_share = float(stream.index == 0)  # the ranks' results are added up
    mixture.reports = stream.index == 0


def with_all_reduce(stream: SequenceSplit) -> Around:
    """Sums a product over the ranks' parts of the dim it contracts; its bias, which all have, is added once.

    An adapter's first weight is cut along that dim, too, and its second weight is linear: one sum is enough for both.
    """

    def around(multiply: Multiply, x_nd: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        own_md = stream.scatter(multiply(x_nd, weight, None))
        return own_md if bias is None else own_md + bias

    return around


def with_repeated_heads(places: Sequence[int], head_width: int) -> Around:
    """Returns of a product the heads at `places`, in this order; a head may be repeated."""

    def around(multiply: Multiply, x_nd: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        heads = multiply(x_nd, weight, bias).unflatten(1, (-1, head_width)).unbind(1)
        return torch.stack([heads[place] for place in places], dim=1).flatten(1)

    return around


def kv_places(shape: ModelShape, parts: int, index: int) -> tuple[int, ...] | None:
    """For each query head of this rank the key/value head that it attends to, as an index among those the rank holds;
    None where they match in order.

    Attention gives each key/value head the same number of consecutive queries. Where that does not fit a rank's
    queries, because the cut separates a query group, there is a key/value head for every query.
    """
    first, queries = equal_share(shape.heads, parts, index)
    first_kv, held = kv_heads_of(shape, parts, index)
    used = tuple(query * shape.kv_heads // shape.heads - first_kv for query in range(first, first + queries))
    distinct = tuple(sorted(set(used)))
    each, torn = divmod(queries, len(distinct))
    if not torn and used == tuple(place for place in distinct for _ in range(each)):
        return None if len(distinct) == held else distinct
    return used


class SharedEmbedding(nn.Module):
    """Each rank looks up the entries that it holds, and keeps its rows of the sum."""

    def __init__(self, embed: Embedding, shape: ModelShape, stream: SequenceSplit) -> None:
        super().__init__()
        self.tokens, self.positions, self.multiplier = embed.tokens, embed.positions, embed.multiplier
        self.layer_tokens, self.layer_projection = embed.layer_tokens, embed.layer_projection
        self.layer_norm = embed.layer_norm
        self.first = first_vocabulary_entry(shape, stream)
        self.stream = stream

    def forward(self, tokens_bt: Tensor, positions_bt: Tensor) -> Tensor:
        """This rank's rows of the stream, [m, d]."""
        own_md = self.look_up(tokens_bt)
        if self.positions is None:
            return own_md
        return own_md + self.positions(self._own(positions_bt.expand(tokens_bt.shape).flatten()))

    def look_up(self, tokens_bt: Tensor) -> Tensor:
        """The rows of these tokens, without positions."""
        own_md = self._rows_of(tokens_bt, self.tokens.weight)
        return own_md if self.multiplier == 1.0 else own_md * self.multiplier

    def layer_inputs(self, tokens_bt: Tensor, embedded_md: Tensor) -> Tensor:
        """What each layer is given of its own of this rank's rows, [m, layers, width of it]."""
        assert self.layer_tokens is not None and self.layer_projection is not None and self.layer_norm is not None
        looked_up_md = self._rows_of(tokens_bt, self.layer_tokens.weight)
        return joined_layer_inputs(looked_up_md, embedded_md, self.layer_projection, self.layer_norm)

    def _rows_of(self, tokens_bt: Tensor, weight_vd: Tensor) -> Tensor:
        """The tokens' rows of a table of which each rank holds some entries: of those this rank's share, [m, d]."""
        entries_n = tokens_bt.flatten() - self.first
        missing_n = (entries_n < 0) | (entries_n >= len(weight_vd))
        found_nd = F.embedding(entries_n.masked_fill(missing_n, 0), weight_vd)
        return self.stream.scatter(found_nd.masked_fill_(missing_n.unsqueeze(1), 0))

    def _own(self, values_n: Tensor) -> Tensor:
        rows = stream_rows(len(values_n), self.stream.parts)
        padded = F.pad(values_n, (0, rows * self.stream.parts - len(values_n)))
        return padded.narrow(0, rows * self.stream.index, rows)


class SharedVocabulary:
    """The vocabulary's entries shared out over the ranks: a `Vocabulary`. Every rank must call it in the same order."""

    def __init__(self, shape: ModelShape, stream: SequenceSplit) -> None:
        self.first = first_vocabulary_entry(shape, stream)
        self._stream, self._most_entries = stream, ceil(shape.vocabulary / stream.parts)

    def most_entries(self, own: int) -> int:
        """The largest number of any rank, whatever this one has: sums must have the same size on all ranks."""
        return self._most_entries

    def enter(self, hidden_nd: Tensor, tokens: int) -> Tensor:
        """All rows; their gradients are what the entries of each rank give, summed."""
        return self._stream.gather(to_compute_precision(hidden_nd), tokens)

    def largest(self, values: Tensor) -> Tensor:
        with WATCH.exchange("tensor rows", values):
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._stream.group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        with WATCH.exchange("tensor rows", values):
            dist.all_reduce(values, group=self._stream.group)
        return values


def first_vocabulary_entry(shape: ModelShape, stream: SequenceSplit) -> int:
    """The first vocabulary entry of embedding and head on this rank."""
    return cut_box("embed.tokens.weight", shape, stream.parts, stream.index).offset[0]


# The flat stream shared out over the ranks of `tensor`: each holds as many of its consecutive rows.
#
# Between the products that a layer shares out, every rank norms and adds up its own rows only. Before such products
# the rows are gathered, after them the ranks' partial results are summed and each keeps its rows of the sum; one is
# the other's backward. Where the ranks do not divide the rows, the last ones hold rows of padding behind the end,
# whose gradients are zero.
#
# Legend: n all rows of the stream, m those of one rank, d numbers of a row.


def stream_rows(rows: int, parts: int) -> int:
    """Rows of a stream that each of `parts` ranks holds, padding included."""
    return -(-rows // parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSplit:
    """Converts between a rank's rows and all rows. Every rank of the group must make the same calls in order."""

    group: dist.ProcessGroup
    parts: int
    index: int
    gather: Callable[[Tensor, int], Tensor]
    """From this rank's rows [m, d] to all rows [n, d], given n; backward sums the ranks' gradients."""
    scatter: Callable[[Tensor], Tensor]
    """From this rank's addend of all rows [n, d] to its own rows of the sum [m, d]."""


def sequence_split(group: dist.ProcessGroup) -> SequenceSplit:
    """The SequenceSplit over the ranks of a group."""

    def gather(own_md: Tensor, rows: int) -> Tensor:
        every_nd: Tensor = _Gather.apply(own_md, rows, group)  # type: ignore[assignment]
        return every_nd

    def scatter(partial_nd: Tensor) -> Tensor:
        own_md: Tensor = _Scatter.apply(partial_nd, group)  # type: ignore[assignment]
        return own_md

    parts, index = dist.get_world_size(group), dist.get_rank(group)
    return SequenceSplit(group=group, parts=parts, index=index, gather=gather, scatter=scatter)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_md: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(own_md, rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _summed(grads[0], ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_nd: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = len(partial_nd), group
        return _summed(partial_nd, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _gathered(grads[0], ctx.rows, ctx.group), None


def _gathered(own_md: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    parts = dist.get_world_size(group)
    every = own_md.new_empty((parts * len(own_md), *own_md.shape[1:]))
    if every.device.type == "cpu":  # see Note [room first] in collectives.py
        every.chunk(parts)[dist.get_rank(group)].copy_(own_md)
        with WATCH.exchange("tensor rows", own_md):
            for work in spread_own(every, group, SPREAD_TAG):
                work.wait()
    else:
        with WATCH.exchange("tensor rows", own_md):
            all_gather(every, own_md.contiguous(), group=group)
    return every if len(every) == rows else every[:rows]


def _summed(partial_nd: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = dist.get_world_size(group)
    sent = _padded(partial_nd.contiguous(), parts)
    own = sent.new_empty((len(sent) // parts, *sent.shape[1:]))
    if sent.device.type == "cpu":  # see Note [room first] in collectives.py
        with WATCH.exchange("tensor rows", sent):
            sum_parts(own, sent, group, SUM_TAG)
    else:
        with WATCH.exchange("tensor rows", sent):
            reduce_scatter(own, sent, group=group)
    return own


def _padded(rows_nd: Tensor, parts: int) -> Tensor:
    """Rows of zeros behind the last, until the parts are equal."""
    missing = stream_rows(len(rows_nd), parts) * parts - len(rows_nd)
    return torch.nn.functional.pad(rows_nd, (0, 0, 0, missing)) if missing else rows_nd
