"""Causal self-attention, inside documents where they are given, with a key/value cache for sampling.

Legend: b rows of the batch, t tokens of a row, n all tokens (b × t), h heads, d numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.accelerator import has_cuda_kernels, is_compiled, suits_flash_kernels, to_device
from plait.model.blocked_attention import attend_in_blocks, suits_blocks
from plait.model.linear import Linear, to_compute_precision
from plait.model.masked_attention import attend_last, attend_masked
from plait.model.matmul import attend_by_default_library
from plait.model.norm import RMSNorm, make_head_norm, make_value_norm, norm_offset
from plait.model.parts.checks import biased_parts
from plait.model.rotary import Rotation, rotate_first, rotate_first_pairs
from plait.model.shape import ModelShape

MOST_PACKED_WIDTH = 256
"""Width of the widest heads that the flash kernel for ragged lengths takes."""
UNFUSED_SCORES, HOST_UNFUSED_SCORES = 2**24, 2**21
"""Scores that are in memory at a time, on GPUs and on CPUs, where torch's kernels cannot compute them."""


def unfused_scores(device: torch.device) -> int:
    """Scores that are in memory at a time where this device has no fused kernel for them."""
    return HOST_UNFUSED_SCORES if device.type == "cpu" else UNFUSED_SCORES


@dataclass(slots=True)
class Documents:
    """Lengths of the consecutive documents in the flattened rows of a batch; none crosses the end of a row.

    `GPT.forward` adds `positions_bt`, the tokens' positions in their documents, and where the device's kernel needs
    them `ends`, shape [documents + 1], the cumulative lengths from 0, unless they are given, and `longest`, an upper
    bound of the lengths.

    Never changed, and yet not frozen: torch 2.11's compiler reads every field of a frozen dataclass that a layer is
    given, and so recompiled for each batch's lengths, also where no graph uses them.
    """

    lengths: tuple[int, ...]
    ends: Tensor | None = None
    longest: int = 0
    positions_bt: Tensor | None = None

    def on(self, device: torch.device, *, longest: int, positions_bt: Tensor) -> Documents:
        """These documents in the form that the device's attention kernel needs; no synchronization with the device.

        `longest` is the length of the longest possible row, not of this batch's longest document: compiled layers
        specialise on the number.
        """
        ends = self.ends
        if is_compiled(device):
            ends = None  # their number would be a shape
        elif ends is None and has_cuda_kernels(device):
            ends = of_any_length(to_device(cumulative_lengths(self.lengths), device))
        return Documents(self.lengths, ends, longest, positions_bt)


def cumulative_lengths(lengths: tuple[int, ...]) -> Tensor:
    """Where documents begin and end: shape [documents + 1], int32, from 0 on."""
    return torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)


def of_any_length(ends: Tensor) -> Tensor:
    """The tensor, marked so that a compiled layer does not recompile at each number of documents."""
    import torch._dynamo  # more than a second of imports; only GPUs need it, where layers are compiled

    torch._dynamo.mark_dynamic(ends, 0)
    return ends


class Cache:
    """Keys and values of the tokens already read, or the latents that they are made from, for sampling: one prompt
    first, then token by token."""

    def __init__(self, shape: ModelShape, *, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kept: dict[int, Tensor] = {}
        for layer in range(shape.layers):
            if shape.shares_kv(layer) or shape.has_delta(layer):
                continue
            own = shape.at(layer)
            kinds, *head = (2, own.kv_heads, own.head_width) if own.latent is None else (1, 1, own.size_of("latent"))
            self._kept[layer] = torch.empty((kinds, rows, shape.sequence, *head), dtype=dtype, device=device)
        self.inputs: dict[int, list[Tensor]] = {}
        """Of layers with delta attention the last inputs of their convolutions."""
        self.states: dict[int, Tensor] = {}
        """The states of these layers' heads."""
        self.length = 0

    def extend_inputs(self, layer: int, new_btd: list[Tensor], most: int) -> tuple[list[Tensor], int]:
        """Put the last inputs of a layer's convolutions in front of new ones; returns them together, and how many were
        there. The last `most` of all are kept."""
        old = self.inputs.get(layer, [x[:, :0] for x in new_btd])
        joined = [torch.cat(pair, dim=1) for pair in zip(old, new_btd, strict=True)]
        self.inputs[layer] = [x[:, max(0, x.shape[1] - most) :] for x in joined]
        return joined, old[0].shape[1]

    def extend(self, layer: int, *new_bthd: Tensor) -> list[Tensor]:
        """Append what is new of a layer: keys and values, or latents; returns all that are kept of each. `length` grows
        only after the last layer."""
        end = self.length + new_bthd[0].shape[1]
        for kept_bthd, added_bthd in zip(self._kept[layer], new_bthd, strict=True):
            kept_bthd[:, self.length : end] = added_bthd
        return [kept_bthd[:, :end] for kept_bthd in self._kept[layer]]


class LentKeys:
    """Keys and values that later layers use again, by "window" or "full"; layers add theirs as they run.

    No dataclass and no dict, of which torch's FSDP2 hands each layer a copy.
    """

    def __init__(self) -> None:
        self.by_kind: dict[str, tuple[Tensor, Tensor]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How the tokens of a flat stream lie in rows: what attention needs besides the stream itself."""

    rows: int
    tokens: int
    """Tokens of a row."""
    rotation: Rotation | None
    documents: Documents | None
    cache: Cache | None
    counted_n: Tensor | None = None
    """Which tokens of the flat stream enter the loss, where a mixture of experts counts; None: all."""
    numbers_n: Tensor | None = None
    """The tokens' numbers in the run, by which a mixture of experts may look up where they went; None: unknown."""
    window_rotation: Rotation | None = None
    """The rotation of layers with a window, where it is not that of the others."""
    noise_n: Tensor | None = None
    """The tokens' hashes in this layer, for adapters' dropout; None: nothing is dropped."""
    query_growth: Tensor | None = None
    """What queries are multiplied by at each position, [b or 1, t, 1, 1]; None: nothing."""
    layer_input: Tensor | None = None
    """What this layer is given of its own, [n, width of it]; None: nothing."""
    positions_bt: Tensor | None = None
    """The tokens' places in their documents, [b or 1, t], where a layer asks for them."""
    lent: LentKeys = field(default_factory=LentKeys)
    """What layers lend to later ones."""


Attend = Callable[..., Tensor]
"""Attention between its projections: (q_bthd, k_bthd, v_bthd, documents, window) to the result, shaped as q_bthd. A
query sees `window` tokens, itself included; 0: all before it. Where scores are capped or heads have sinks, `cap` and
`sinks_h` follow (masked_attention.py); only these models pass them."""


class Attention(nn.Module):
    """Multi-head or grouped-query attention.

    Head counts are read off the weights, so a module that holds a part of the heads works as it stands; `attend` may be
    replaced by another core of the same mathematics. `k` is None in a layer that shares another one's keys and values,
    and `v` there, too, and where keys are values.
    """

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        biased = biased_parts(shape.bias)
        shares, is_value = shape.shares_kv(layer), shape.values_are_keys(layer)
        self.lends, self.window = shape.lends_kv(layer), shape.window_of(layer)
        self.kind = "window" if self.window else "full"
        shape = shape.at(layer)
        query_width, kv_width = shape.size_of("heads"), shape.size_of("kv_heads")
        self.layer = layer
        self.head_width = shape.head_width
        self.query_scale = 1.0 if shape.attention_scale == "head" else 1.0 / (layer + 1)
        if shape.attention_multiplier:  # the cores divide by the root of the head's width
            self.query_scale *= shape.attention_multiplier * sqrt(shape.head_width)
        self.cap = shape.attention_cap
        self.sinks = nn.Parameter(torch.zeros(shape.heads)) if shape.attention_sinks else None
        self.is_rotated = layer not in shape.unrotated_layers
        self.rotate = rotate_first if shape.rotary_pairs == "halves" else rotate_first_pairs
        self.is_gated = shape.attention_gate
        queries = shape.size_of("queries")
        self.q = Linear(shape.width, queries, bias="qkv" in biased, adapter=shape.adapter_of("attention.q"))
        self.k = self.v = None
        if not shares:
            self.k = Linear(shape.width, kv_width, bias="qkv" in biased, adapter=shape.adapter_of("attention.k"))
        if not (shares or is_value):
            self.v = Linear(shape.width, kv_width, bias="qkv" in biased, adapter=shape.adapter_of("attention.v"))
        by_head = shape.qk_norm and shape.qk_norm_width == "head"
        self.q_norm = make_head_norm(shape) if by_head else nn.Identity()
        self.k_norm = make_head_norm(shape) if by_head and not shares else nn.Identity()
        self.v_norm = make_value_norm(shape) if shape.value_norm else nn.Identity()
        as_one = shape.qk_norm and shape.qk_norm_width == "all heads"
        offset = norm_offset(shape)
        self.queries_norm = RMSNorm(query_width, shape.norm_eps, offset=offset) if as_one else nn.Identity()
        self.keys_norm = RMSNorm(kv_width, shape.norm_eps, offset=offset) if as_one else nn.Identity()
        self.o = Linear(query_width, shape.width, bias="output" in biased, adapter=shape.adapter_of("attention.o"))
        self.attend: Attend = attend

    def forward(self, x_nd: Tensor, rows: Rows) -> Tensor:
        heads = (rows.rows, rows.tokens, -1, self.head_width)
        x_nd = to_compute_precision(x_nd)  # once: autocast would keep a copy for each product
        made_v_bthd = None if self.v is None else self.v(x_nd, rows.noise_n).view(heads)
        made_nd, gate_bthd = self.q(x_nd, rows.noise_n), None
        # On GPUs autocast has norms answer in float32, which attention's fast kernels do not take.
        if self.is_gated:
            made_bthd, gate_bthd = made_nd.view(rows.rows, rows.tokens, -1, 2 * self.head_width).chunk(2, dim=-1)
            q_bthd = self.q_norm(made_bthd).to(made_nd.dtype)
        else:
            q_bthd = self.q_norm(self.queries_norm(made_nd).view(heads)).to(made_nd.dtype)
        local = self.window > 0 and rows.window_rotation is not None
        rotation = (rows.window_rotation if local else rows.rotation) if self.is_rotated else None
        if self.k is None:
            k_bthd, v_bthd = rows.lent.by_kind[self.kind]
        else:
            k_bthd, v_bthd = self._keys_and_values(self.k(x_nd, rows.noise_n), made_v_bthd, rows, rotation)
        q_bthd = q_bthd if rotation is None else self.rotate(q_bthd, rotation)
        if rows.query_growth is not None:
            q_bthd = (q_bthd * rows.query_growth).to(made_nd.dtype)
        if self.query_scale != 1.0:
            q_bthd = q_bthd * self.query_scale
        if rows.cache is not None:
            mixed_bthd = attend_cached(q_bthd, k_bthd, v_bthd, self.window, self.cap, self.sinks)
        elif self.cap or self.sinks is not None:
            mixed_bthd = self.attend(q_bthd, k_bthd, v_bthd, rows.documents, self.window, self.cap, self.sinks)
        else:
            mixed_bthd = self.attend(q_bthd, k_bthd, v_bthd, rows.documents, self.window)
        if gate_bthd is not None:
            mixed_bthd = mixed_bthd * gate_bthd.sigmoid()
        return self.o(mixed_bthd.reshape(len(x_nd), -1), rows.noise_n)

    def _keys_and_values(
        self, made_nd: Tensor, made_v_bthd: Tensor | None, rows: Rows, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        """This layer's own from what its matrices give, with those of earlier tokens where there is a cache; lent to
        later layers if they share them. Without a matrix for values they are made of the keys."""
        heads = (rows.rows, rows.tokens, -1, self.head_width)
        k_bthd = self.k_norm(self.keys_norm(made_nd).view(heads)).to(made_nd.dtype)
        v_bthd = self.v_norm(made_nd.view(heads) if made_v_bthd is None else made_v_bthd).to(made_nd.dtype)
        k_bthd = k_bthd if rotation is None else self.rotate(k_bthd, rotation)
        if rows.cache is not None:
            k_bthd, v_bthd = rows.cache.extend(self.layer, k_bthd, v_bthd)
        if self.lends:
            rows.lent.by_kind[self.kind] = k_bthd, v_bthd
        return k_bthd, v_bthd


def attend(
    q_bthd: Tensor,
    k_bthd: Tensor,
    v_bthd: Tensor,
    documents: Documents | None,
    window: int = 0,
    cap: float = 0.0,
    sinks_h: Tensor | None = None,
) -> Tensor:
    """Each token sees itself and the earlier tokens of its row, or of its document where documents are given; of these
    the last `window` ones, itself included, where that is not 0."""
    if is_compiled(q_bthd.device) or cap or sinks_h is not None:
        positions_bt = None if documents is None else documents.positions_bt
        assert documents is None or positions_bt is not None, "Documents.on adds the positions"
        if is_compiled(q_bthd.device):
            return attend_masked(q_bthd, k_bthd, v_bthd, positions_bt, window, cap=cap, sinks_h=sinks_h)
        unfused: Attend = _attend_unfused if q_bthd.device.type == "cpu" else _outside_graphs(_attend_unfused)
        return unfused(q_bthd, k_bthd, v_bthd, positions_bt, window, cap, sinks_h)
    if documents is None:
        return _attend_rows(q_bthd, k_bthd, v_bthd, window)
    # Of bfloat16 it is known, and a compiled layer need not ask.
    fits = q_bthd.shape[-1] <= MOST_PACKED_WIDTH and (q_bthd.dtype == torch.bfloat16 or suits_flash_kernels(q_bthd))
    if documents.ends is not None and fits:
        return _attend_packed(q_bthd, k_bthd, v_bthd, documents, window)
    core: Attend = _attend_documents
    if documents.ends is not None:  # else a graph would be compiled for each set of lengths
        core = _outside_graphs(core)
    return core(q_bthd, k_bthd, v_bthd, documents, window)


def _outside_graphs(core: Attend) -> Attend:
    apart: Any = torch.compiler.disable(core)
    return apart


def _attend_documents(
    q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, documents: Documents | None, window: int
) -> Tensor:
    """Documents without a kernel for ragged lengths: processors, GPUs in float32, old GPUs in float16."""
    assert documents is not None
    length = documents.lengths[0]
    if all(other == length for other in documents.lengths):
        q, k, v = (x.reshape(-1, length, *x.shape[2:]) for x in (q_bthd, k_bthd, v_bthd))
        return _attend_rows(q, k, v, window).reshape(q_bthd.shape)
    return _attend_segments(q_bthd, k_bthd, v_bthd, documents.lengths, window)


def _attend_unfused(
    q_bthd: Tensor,
    k_bthd: Tensor,
    v_bthd: Tensor,
    positions_bt: Tensor | None,
    window: int,
    cap: float,
    sinks_h: Tensor | None,
) -> Tensor:
    """Capped scores and sinks, for which torch's kernels have no place."""
    at_once = unfused_scores(q_bthd.device)
    return attend_masked(q_bthd, k_bthd, v_bthd, positions_bt, window, at_once, cap, sinks_h)


def attend_cached(
    q_bthd: Tensor,
    k_bthd: Tensor,
    v_bthd: Tensor,
    window: int = 0,
    cap: float = 0.0,
    sinks_h: Tensor | None = None,
) -> Tensor:
    """Attention of the newest tokens over all kept ones: a whole prompt into an empty cache, or a single token."""
    new, kept = q_bthd.shape[1], k_bthd.shape[1]
    assert new in (1, kept), "a cache takes one prompt, then single tokens"
    if new > 1:
        if cap or sinks_h is not None:
            return _attend_unfused(q_bthd, k_bthd, v_bthd, None, window, cap, sinks_h)
        return _attend_rows(q_bthd, k_bthd, v_bthd, window)
    if cap or sinks_h is not None:
        return attend_last(q_bthd, k_bthd[:, -window:], v_bthd[:, -window:], cap, sinks_h)
    return _sdpa(q_bthd, k_bthd[:, -window:], v_bthd[:, -window:], causal=False)


def _attend_rows(q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, window: int) -> Tensor:
    tokens = q_bthd.shape[1]
    if not 0 < window < tokens:
        return _sdpa(q_bthd, k_bthd, v_bthd, causal=True)
    seen_ts = torch.ones(tokens, tokens, dtype=torch.bool, device=q_bthd.device).tril_().triu_(1 - window)
    return _sdpa(q_bthd, k_bthd, v_bthd, causal=False, seen_ts=seen_ts)


def _attend_segments(q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, lengths: tuple[int, ...], window: int) -> Tensor:
    """One causal attention a document. Split, not slices: a slice's backward fills a zero tensor of full size."""
    parts = (x.flatten(0, 1).split(list(lengths)) for x in (q_bthd, k_bthd, v_bthd))
    mixed = [_attend_rows(q[None], k[None], v[None], window)[0] for q, k, v in zip(*parts, strict=True)]
    return torch.cat(mixed).view(q_bthd.shape)


def _attend_packed(q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, documents: Documents, window: int) -> Tensor:
    """All documents in one call of the flash kernel for ragged lengths."""
    from torch.nn.attention.varlen import varlen_attn  # the import takes a second; only GPUs need it

    assert documents.ends is not None
    return attend_ragged(varlen_attn, q_bthd, k_bthd, v_bthd, documents.ends, documents.longest, window)


def attend_ragged(
    kernel: Callable[..., Any],
    q_bthd: Tensor,
    k_bthd: Tensor,
    v_bthd: Tensor,
    ends: Tensor,
    longest: int,
    window: int = 0,
) -> Tensor:
    """What `kernel`, torch's varlen_attn of any version, makes of all documents. It looks backward only: its own window
    is (tokens before the query, 0), with -1 for all."""
    q_nhd, k_nhd, v_nhd = (x.flatten(0, 1) for x in (q_bthd, k_bthd, v_bthd))
    sharing = q_nhd.shape[1] // k_nhd.shape[1]
    grouped: dict[str, Any] = {}
    if sharing > 1 and "enable_gqa" in signature(kernel).parameters:
        grouped = {"enable_gqa": True}
    elif sharing > 1:  # torch 2.11
        k_nhd, v_nhd = (x.repeat_interleave(sharing, dim=1) for x in (k_nhd, v_nhd))
    mixed = kernel(q_nhd, k_nhd, v_nhd, ends, ends, longest, longest, window_size=(window - 1, 0), **grouped)
    assert isinstance(mixed, Tensor)
    return mixed.view(q_bthd.shape)


def _sdpa(q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, *, causal: bool, seen_ts: Tensor | None = None) -> Tensor:
    q_bhtd, k_bhtd, v_bhtd = (x.transpose(1, 2) for x in (q_bthd, k_bthd, v_bthd))
    if causal and suits_blocks(q_bhtd):
        return attend_in_blocks(q_bhtd, k_bhtd, v_bhtd).transpose(1, 2)
    grouped = q_bhtd.shape[1] != k_bhtd.shape[1]
    core = partial(F.scaled_dot_product_attention, attn_mask=seen_ts, is_causal=causal, enable_gqa=grouped)
    return attend_by_default_library(core, q_bhtd, k_bhtd, v_bhtd).transpose(1, 2)
