"""The decoder: embedding, layers, final norm, head.

Legend: b rows of the batch, t tokens of a row, d numbers of the model's width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.model.attention import Attention, Cache, Documents
from plait.model.feedforward import FeedForward
from plait.model.norm import make_norm
from plait.model.rotary import Rotary, Rotation
from plait.model.shape import ModelShape


class GPT(nn.Module):
    """A language model of the given shape; its weights mean nothing until `initialize` or a checkpoint fills them.

    Layers live in a dict keyed by their global number, so whoever keeps a part of them keeps their names.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = Embedding(shape)
        self.layers = nn.ModuleDict({str(layer): Layer(shape, layer) for layer in range(shape.layers)})
        self.norm = make_norm(shape)
        self.head = None if shape.tied else nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.rotary = (
            Rotary(sequence=shape.sequence, head_width=shape.head_width, theta=shape.rope_theta)
            if shape.positions == "rope"
            else None
        )

    def forward(
        self,
        tokens_bt: Tensor,
        positions_bt: Tensor | None = None,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Hidden states [B, T, width] after the final norm, before the head.

        Positions count from 0 in each row (from the cache's length where there is one) unless given; documents need
        them given, restarting with each document.
        """
        if positions_bt is None:
            positions_bt = row_positions(tokens_bt, first=cache.length if cache is not None else 0)
        hidden_btd = self.embed(tokens_bt, positions_bt)
        hidden_btd = self.run_layers(hidden_btd, positions_bt, documents, cache)
        return self.norm(hidden_btd)

    def run_layers(
        self, hidden_btd: Tensor, positions_bt: Tensor, documents: Documents | None = None, cache: Cache | None = None
    ) -> Tensor:
        """The layers that are present, in order, without embedding and final norm."""
        rotation = self.rotary(positions_bt, hidden_btd.dtype) if self.rotary is not None else None
        documents = documents.on(hidden_btd.device) if documents is not None else None
        for layer in self.layers.values():
            hidden_btd = layer(hidden_btd, rotation, documents, cache)
        if cache is not None:
            cache.length += hidden_btd.shape[1]
        return hidden_btd

    def logits(self, hidden_btd: Tensor) -> Tensor:
        """Scores of every vocabulary entry, [B, T, vocabulary]."""
        return F.linear(hidden_btd, self.head_weight())

    def head_weight(self) -> Tensor:
        """The head's matrix [vocabulary, width], for losses that work through it in pieces; the embedding when tied."""
        return self.embed.tokens.weight if self.head is None else self.head.weight


class Embedding(nn.Module):
    """Token embedding, plus a learned vector a position where the shape says so."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width) if shape.positions == "learned" else None

    def forward(self, tokens_bt: Tensor, positions_bt: Tensor) -> Tensor:
        embedded_btd = self.tokens(tokens_bt)
        return embedded_btd if self.positions is None else embedded_btd + self.positions(positions_bt)


class Layer(nn.Module):
    """Attention, then feed-forward, each on a normed copy and added to the stream."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape, layer)
        self.feedforward_norm = make_norm(shape)
        self.feedforward = FeedForward(shape)

    def forward(
        self,
        hidden_btd: Tensor,
        rotation: Rotation | None = None,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        hidden_btd = hidden_btd + self.attention(self.attention_norm(hidden_btd), rotation, documents, cache)
        return hidden_btd + self.feedforward(self.feedforward_norm(hidden_btd))


def row_positions(tokens_bt: Tensor, first: int = 0) -> Tensor:
    """Positions first, first + 1, … as [1, T]: the same for every row."""
    return torch.arange(first, first + tokens_bt.shape[1], device=tokens_bt.device).unsqueeze(0)
