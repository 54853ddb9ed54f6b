"""Gated delta attention as a module: projections, a short convolution, the rule, a gated norm (Qwen 3.5).

Legend: b rows of the batch, t tokens of a row, n all tokens (b × t), h value heads, d numbers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.model.attention import Rows
from plait.model.delta_rule import convolve, delta_rule, delta_step, of_length_one
from plait.model.linear import Linear, to_compute_precision
from plait.model.norm import RMSNorm
from plait.model.parts.delta_attention import DeltaAttentionShape
from plait.model.shape import ModelShape


class DeltaAttention(nn.Module):
    """Gated delta attention of one layer. Head counts are read off the weights, so a module that holds a part of the
    heads works as it stands."""

    def __init__(self, shape: ModelShape, delta: DeltaAttentionShape, layer: int) -> None:
        super().__init__()
        self.layer, self.delta = layer, delta
        width, keys, values = shape.width, shape.size_of("delta_keys"), shape.size_of("delta_values")
        self.delta_q = Linear(width, keys, bias=False)
        self.delta_k = Linear(width, keys, bias=False)
        self.delta_v = Linear(width, values, bias=False)
        self.delta_q_taps = nn.Parameter(torch.zeros(keys, delta.taps))
        self.delta_k_taps = nn.Parameter(torch.zeros(keys, delta.taps))
        self.delta_v_taps = nn.Parameter(torch.zeros(values, delta.taps))
        self.delta_gate = Linear(width, values, bias=False)
        self.delta_write = Linear(width, delta.value_heads, bias=False)
        self.delta_decay = Linear(width, delta.value_heads, bias=False)
        self.delta_decay_bias = nn.Parameter(torch.zeros(delta.value_heads))
        self.delta_decay_log = nn.Parameter(torch.zeros(delta.value_heads))
        self.delta_norm = RMSNorm(delta.value_width, shape.norm_eps)
        self.delta_o = Linear(values, width, bias=False)

    def forward(self, x_nd: Tensor, rows: Rows) -> Tensor:
        assert rows.positions_bt is not None
        x_nd = to_compute_precision(x_nd)  # once: autocast would keep a copy for each product
        split = (rows.rows, rows.tokens, -1)
        made = [one(x_nd).view(split) for one in (self.delta_q, self.delta_k, self.delta_v)]
        write_bth, raw_decay_bth = (one(x_nd).view(split) for one in (self.delta_write, self.delta_decay))
        gate_bthd = self.delta_gate(x_nd).view(*split, self.delta.value_width)
        dtype = torch.promote_types(x_nd.dtype, torch.float32)
        # The rule sums over whole sequences: in 16 bits it would lose most of a state.
        with _without_autocast(x_nd):
            made = [one.to(dtype) for one in made]
            log_decay_bth = -self.delta_decay_log.to(dtype).exp() * F.softplus(
                raw_decay_bth.to(dtype) + self.delta_decay_bias.to(dtype)
            )
            read_bthd = self._read(made, log_decay_bth, write_bth.to(dtype).sigmoid(), rows)
        normed_bthd = self.delta_norm(read_bthd).to(dtype) * F.silu(gate_bthd.to(dtype))
        return self.delta_o(to_compute_precision(normed_bthd.reshape(len(x_nd), -1)).to(x_nd.dtype))

    def _read(self, made: list[Tensor], log_decay_bth: Tensor, write_bth: Tensor, rows: Rows) -> Tensor:
        """What the heads' states give to queries, [b, t, h, width of a value]."""
        taps = [one.to(made[0].dtype) for one in (self.delta_q_taps, self.delta_k_taps, self.delta_v_taps)]
        positions_bt = rows.positions_bt
        assert positions_bt is not None
        cache, before = rows.cache, 0
        if cache is not None:
            made, before = cache.extend_inputs(self.layer, made, self.delta.taps - 1)
            number = torch.arange(before + rows.tokens, device=made[0].device)
            positions_bt = positions_bt[:, :1] - before + number
        mixed = [
            F.silu(convolve(one, own, positions_bt))[:, before:].unflatten(2, (-1, width))
            for one, own, width in zip(
                made, taps, (self.delta.key_width, self.delta.key_width, self.delta.value_width), strict=True
            )
        ]
        each = self.delta.value_heads // self.delta.key_heads
        q_bthd, k_bthd = (of_length_one(one).repeat_interleave(each, dim=2) for one in mixed[:2])
        v_bthd = mixed[2]
        state = None if cache is None else cache.states.get(self.layer)
        if cache is not None and state is not None:
            assert rows.tokens == 1, "a cache takes one prompt, then single tokens"
            one = [x[:, 0] for x in (q_bthd, k_bthd, v_bthd, log_decay_bth, write_bth)]
            read_bhd, cache.states[self.layer] = delta_step(one[0], one[1], one[2], one[3], one[4], state)
            return read_bhd.unsqueeze(1)
        document_bt = (rows.positions_bt == 0).cumsum(-1)
        read_bthd, state = delta_rule(q_bthd, k_bthd, v_bthd, log_decay_bth, write_bth, document_bt)
        if cache is not None:
            cache.states[self.layer] = state
        return read_bthd


def _without_autocast(x: Tensor) -> AbstractContextManager[None]:
    kind = x.device.type
    if kind == "meta":  # numbers that are only counted have no autocast
        return nullcontext()
    off: Any = torch.autocast(kind, enabled=False)
    return off
