"""The peers' model in the strands' benchmark: a Llama in plain torch, for torch's own means of training in parallel.

Its weights have the names of plait's, so that both start from the same numbers (plait.model.init.first_value).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from plait.model.init import first_value
from plait.model.shape import ModelPart, ModelShape, whole_model

# Shapes: b sequences, t tokens, h heads, d head width, w width, v vocabulary.


class Attention(nn.Module):
    """Causal attention with rotary positions; as many heads as the weights have."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.q, self.k, self.v, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in "qkvo")

    def forward(self, x_btw: torch.Tensor, cos_td: torch.Tensor, sin_td: torch.Tensor) -> torch.Tensor:
        q_bhtd, k_bhtd, v_bhtd = (
            y.unflatten(2, (-1, self.head_width)).transpose(1, 2) for y in (self.q(x_btw), self.k(x_btw), self.v(x_btw))
        )
        q_bhtd, k_bhtd = rotate(q_bhtd, cos_td, sin_td), rotate(k_bhtd, cos_td, sin_td)
        y_bhtd = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, is_causal=True)
        return self.o(y_bhtd.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.ffn, bias=False)
        self.up = nn.Linear(shape.width, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x_btw: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_btw)) * self.up(x_btw))


class Layer(nn.Module):
    """Attention, then feed-forward, each on a normed copy."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, shape.norm_eps)
        self.attention = Attention(shape)
        self.feedforward_norm = nn.RMSNorm(shape.width, shape.norm_eps)
        self.feedforward = FeedForward(shape)

    def forward(self, x_btw: torch.Tensor, cos_td: torch.Tensor, sin_td: torch.Tensor) -> torch.Tensor:
        x_btw = x_btw + self.attention(self.attention_norm(x_btw), cos_td, sin_td)
        return x_btw + self.feedforward(self.feedforward_norm(x_btw))


class Llama(nn.Module):
    """The model or some layers of it: from tokens, or the part before's result, to scores or the next part's input."""

    def __init__(self, shape: ModelShape, part: ModelPart | None = None) -> None:
        super().__init__()
        part = part or whole_model(shape)
        self.embed = nn.ModuleDict({"tokens": nn.Embedding(shape.vocabulary, shape.width)} if part.embeds else {})
        self.layers = nn.ModuleDict({str(layer): Layer(shape) for layer in part.layers})
        self.norm = nn.RMSNorm(shape.width, shape.norm_eps) if part.ends else None
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if part.ends else None
        pairs = torch.arange(0, shape.head_width, 2, dtype=torch.float64)
        angles = torch.outer(torch.arange(shape.sequence).double(), shape.rope_theta ** (-pairs / shape.head_width))
        self.register_buffer("cos_td", angles.cos().float(), persistent=False)
        self.register_buffer("sin_td", angles.sin().float(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for table in self.embed.values():
            x = table(x)
        for layer in self.layers.values():
            x = layer(x, self.cos_td, self.sin_td)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def rotate(x_bhtd: torch.Tensor, cos_td: torch.Tensor, sin_td: torch.Tensor) -> torch.Tensor:
    """Turn number i and number i + d/2 of each head by the position's angle."""
    first, second = x_bhtd.chunk(2, dim=-1)
    return torch.cat((first * cos_td - second * sin_td, second * cos_td + first * sin_td), dim=-1)


@torch.no_grad()
def filled(model: Llama, shape: ModelShape, seed: int) -> Llama:
    """The model with the first values that plait's has."""
    for name, parameter in model.named_parameters():
        parameter.copy_(first_value(name, shape, seed))
    return model


def mean_loss(scores_btv: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
    """Cross-entropy a token."""
    return F.cross_entropy(scores_btv.flatten(0, 1), targets_bt.flatten())


def decay_groups(named: Sequence[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, object]]:
    """AdamW's groups: decay on the matrices of linear layers, none on norms and embeddings."""
    matrices = [p for name, p in named if p.dim() > 1 and "embed" not in name]
    vectors = [p for name, p in named if p.dim() == 1]
    tables = [p for name, p in named if "embed" in name]
    groups = [(matrices, weight_decay), (vectors, 0.0), (tables, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]
