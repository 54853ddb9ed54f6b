"""Multi-head latent attention (MLA; DeepSeek-V2, 2405.04434, section 2.1): keys and values of all heads from one narrow
vector a token, whose part with rotary positions all heads share.

Note [latents are what is kept]: a cache holds a token's latent, normed, and its turned key part: `key_value_rank` +
`rope_width` numbers, for any number of heads. A new token's queries are multiplied by the heads' own matrices of
keys first and meet the latents themselves, as do results those of values: the same products in another order.

Note [equal widths]: attention's kernels take keys and values of one width. Zeros behind the narrower change no score
and no result; the factor that the kernel divides scores by is corrected in the queries.

Legend: b rows of the batch, t tokens of a row, n all tokens, m those of one rank, h heads, d numbers of a head, r of a
latent.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.model.attention import Attend, Attention, Rows, attend, attend_cached
from plait.model.delta_attention import DeltaAttention
from plait.model.linear import Linear, to_compute_precision
from plait.model.norm import RMSNorm
from plait.model.parts.latent_attention import LATENT_NORM_EPS, LatentAttentionShape, score_factor
from plait.model.rotary import rotate_pairs
from plait.model.shape import ModelShape

GatherRows = Callable[[Tensor, int], Tensor]
"""From this rank's rows [m, d] of something to all rows [n, d], given n."""


class LatentAttention(nn.Module):
    """Attention through latents; like `Attention` it counts its heads by its weights.

    `gather` may be replaced where ranks hold some rows each: down-projections and norms are then of own rows, and
    latents travel in place of the wider stream.
    """

    def __init__(self, shape: ModelShape, latent: LatentAttentionShape, layer: int) -> None:
        super().__init__()
        self.latent, self.layer = latent, layer
        self.plain_width = shape.head_width
        self.query_width = shape.head_width + latent.rope_width
        self.window = shape.window_of(layer)
        self.score_factor = score_factor(latent, shape.rope.factor if shape.rope else 1.0)
        width, queries = shape.width, shape.size_of("query_heads")
        narrow = latent.query_rank
        self.query = None if narrow else Linear(width, queries, bias=False)
        self.query_down = Linear(width, narrow, bias=False) if narrow else None
        self.query_norm = RMSNorm(narrow, LATENT_NORM_EPS) if narrow else None
        self.query_up = Linear(narrow, queries, bias=False) if narrow else None
        self.key_value_down = Linear(width, shape.size_of("latent"), bias=False)
        self.key_value_norm = RMSNorm(latent.key_value_rank, LATENT_NORM_EPS)
        self.key_value_up = Linear(latent.key_value_rank, shape.size_of("key_value_heads"), bias=False)
        self.o = Linear(shape.size_of("heads"), width, bias=False)
        self.attend: Attend = attend
        self.gather: GatherRows = all_rows

    def forward(self, x_nd: Tensor, rows: Rows) -> Tensor:
        x_nd = to_compute_precision(x_nd)  # once: autocast would keep a copy for each product
        tokens = rows.rows * rows.tokens
        queried_nd = self.gather(self._queried(x_nd), tokens)
        latent_nr, rope_nd = self.key_value_down(x_nd).split(self._latent_parts, dim=1)
        normed_nr = self.key_value_norm(latent_nr).to(rope_nd.dtype)
        latent_bt1r, k_rope_bt1d = (
            self.gather(torch.cat((normed_nr, rope_nd), dim=1), tokens)
            .view(rows.rows, rows.tokens, 1, -1)
            .split(self._latent_parts, dim=3)
        )
        up = self.query if self.query is not None else self.query_up
        assert up is not None and rows.rotation is not None
        q_bthd = up(queried_nd).view(rows.rows, rows.tokens, -1, self.query_width)
        q_bthd, q_rope_bthd = q_bthd.split((self.plain_width, self.latent.rope_width), dim=3)
        turned = rotate_pairs(q_rope_bthd, rows.rotation), rotate_pairs(k_rope_bt1d, rows.rotation)
        mixed_bthd = self._mixed((q_bthd, turned[0]), (latent_bt1r, turned[1]), rows)
        return self.o(mixed_bthd.reshape(tokens, -1))

    @property
    def _latent_parts(self) -> tuple[int, int]:
        return self.latent.key_value_rank, self.latent.rope_width

    def _queried(self, x_nd: Tensor) -> Tensor:
        """The input of queries: a separate latent, or the stream."""
        if self.query_down is None or self.query_norm is None:
            return x_nd
        down_nr = self.query_down(x_nd)
        return self.query_norm(down_nr).to(down_nr.dtype)

    def _mixed(self, queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], rows: Rows) -> Tensor:
        """The values that queries take, [b, t, h, value width], from queries and keys without and with positions."""
        latent_bt1r, k_rope_bt1d = keys
        if rows.cache is not None:
            (kept_bt1r,) = rows.cache.extend(self.layer, torch.cat(keys, dim=3))
            if kept_bt1r.shape[1] > rows.tokens:
                return self._mixed_latents(queries, kept_bt1r)
        up_nd = self.key_value_up(latent_bt1r.flatten(0, 2))
        up_bthd = up_nd.view(rows.rows, rows.tokens, -1, self.plain_width + self._value_width)
        k_bthd, v_bthd = up_bthd.split((self.plain_width, self._value_width), dim=3)
        k_bthd = torch.cat((k_bthd, k_rope_bt1d.to(k_bthd.dtype).expand(-1, -1, k_bthd.shape[2], -1)), dim=3)
        q_bthd = torch.cat(queries, dim=3).to(k_bthd.dtype)
        wide = max(self.query_width, self._value_width)  # Note [equal widths]
        q_bthd = q_bthd * (self.score_factor * sqrt(wide / self.query_width))
        q_bthd, k_bthd, v_bthd = (_widened(x, wide) for x in (q_bthd, k_bthd, v_bthd))
        if rows.cache is not None:
            mixed_bthd = attend_cached(q_bthd, k_bthd, v_bthd, self.window)
        else:
            mixed_bthd = self.attend(q_bthd, k_bthd, v_bthd, rows.documents, self.window)
        return mixed_bthd[..., : self._value_width]

    def _mixed_latents(self, queries: tuple[Tensor, Tensor], kept_bt1r: Tensor) -> Tensor:
        """Attention of one new token a row over kept latents: Note [latents are what is kept]."""
        up_hdr = self.key_value_up.weight.unflatten(0, (-1, self.plain_width + self._value_width))
        to_keys_hdr, to_values_hdr = up_hdr.split((self.plain_width, self._value_width), dim=1)
        q_bthd, q_rope_bthd = queries
        q_bthr = torch.cat((torch.einsum("bthd,hdr->bthr", q_bthd, to_keys_hdr), q_rope_bthd), dim=3)
        q_bthr = q_bthr * (self.score_factor * sqrt(q_bthr.shape[3] / self.query_width))
        values_bt1r = _widened(kept_bt1r[..., : self.latent.key_value_rank], kept_bt1r.shape[3])
        mixed_bthr = attend_cached(q_bthr.to(kept_bt1r.dtype), kept_bt1r, values_bt1r, self.window)
        return torch.einsum("bthr,hdr->bthd", mixed_bthr[..., : self.latent.key_value_rank], to_values_hdr)

    @property
    def _value_width(self) -> int:
        return self.latent.value_width


AnyAttention = Attention | LatentAttention | DeltaAttention


def make_attention(shape: ModelShape, layer: int) -> AnyAttention:
    """The attention of a layer, of the kind that the shape says."""
    if shape.delta is not None and layer in shape.delta.layers:
        return DeltaAttention(shape, shape.delta, layer)
    return Attention(shape, layer) if shape.latent is None else LatentAttention(shape, shape.latent, layer)


def all_rows(own_md: Tensor, rows: int) -> Tensor:
    """The GatherRows of a process that has all rows."""
    return own_md


def _widened(x: Tensor, width: int) -> Tensor:
    """With zeros behind, up to this width."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
