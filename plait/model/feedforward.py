"""The feed-forward half of a layer: GELU, ReLU², SwiGLU (also gpt-oss's clamped one) or GeGLU between two or three
products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.model.linear import Linear, to_compute_precision
from plait.model.parts.checks import biased_parts
from plait.model.shape import CLAMPED_AT, CLAMPED_SLOPE, GATED, ModelShape, is_gated


class FeedForward(nn.Module):
    """Up projection, activation, down projection; with SwiGLU and GeGLU (Shazeer 2020) a second up projection is the
    gate. Its inner width is the shape's `ffn` unless another is given, as for an expert, which has biases of its
    own."""

    def __init__(self, shape: ModelShape, ffn: int | None = None, *, biased: bool = False) -> None:
        super().__init__()
        ffn = shape.ffn if ffn is None else ffn
        bias = biased or "feedforward" in biased_parts(shape.bias)
        self.activation = shape.activation
        if is_gated(shape):
            self.gate = Linear(shape.width, ffn, bias=bias, adapter=shape.adapter_of("feedforward.gate"))
        self.up = Linear(shape.width, ffn, bias=bias, adapter=shape.adapter_of("feedforward.up"))
        self.down = Linear(ffn, shape.width, bias=bias, adapter=shape.adapter_of("feedforward.down"))

    def forward(self, x_nd: Tensor, noise_n: Tensor | None = None) -> Tensor:
        """`noise_n` are the tokens' hashes in this layer, where adapters drop some of what they read."""
        return self.down(self.inner(x_nd, noise_n), noise_n)

    def inner(self, x_nd: Tensor, noise_n: Tensor | None = None) -> Tensor:
        """What the down projection is given."""
        x_nd = to_compute_precision(x_nd)  # once: autocast would keep a copy for each product
        gate_nf = self.gate(x_nd, noise_n) if self.activation in GATED else None
        return activated(self.activation, gate_nf, self.up(x_nd, noise_n))


def activated(activation: str, gate_nf: Tensor | None, up_nf: Tensor) -> Tensor:
    """What lies between a feed-forward part's products, of f inner numbers; the gate is that of GATED ones."""
    if activation == "clamped swiglu" and gate_nf is not None:
        gate_nf, up_nf = gate_nf.clamp(max=CLAMPED_AT), up_nf.clamp(min=-CLAMPED_AT, max=CLAMPED_AT)
        return (up_nf + 1) * (gate_nf * torch.sigmoid(gate_nf * CLAMPED_SLOPE))
    if gate_nf is not None:
        gate_nf = F.silu(gate_nf) if activation == "swiglu" else F.gelu(gate_nf, approximate="tanh")
        return gate_nf * up_nf
    return F.relu(up_nf).square() if activation == "relu2" else F.gelu(up_nf, approximate="tanh")
