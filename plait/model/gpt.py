"""The decoder: embedding, layers, final norm, head.

Legend: b rows of the batch, t tokens of a row, n all tokens one row after the other, d numbers of the model's width.
The residual stream is flat, [N, width]: code that splits tokens over ranks need not know rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.model.attention import Attention, Cache, Documents, Rows
from plait.model.experts.mixture import Mixture
from plait.model.feedforward import FeedForward
from plait.model.kernels.norm import make_norm
from plait.model.kernels.rotary import Rotary
from plait.model.linear import Linear
from plait.model.shape import ModelPart, ModelShape, whole_model
from plait.model.weights import is_trained


class GPT(nn.Module):
    """A language model of the given shape, or a part of it; its weights are uninitialized (see init.py), and those that
    do not learn ask for no gradient.

    Layers are in a dict keyed by their global number, so that a part of the model keeps the weights' names. `embed` is
    None in a part without the embedding, `norm` in a part without the head.
    """

    def __init__(self, shape: ModelShape, part: ModelPart | None = None) -> None:
        super().__init__()
        part = part or whole_model(shape)
        self.shape = shape
        self.part = part
        # A tied head needs the embedding's weight, wherever it is.
        self.embed = Embedding(shape, part) if part.embeds or (part.ends and shape.tied) else None
        self.layers = nn.ModuleDict({str(layer): Layer(shape, layer) for layer in part.layers})
        self.norm = make_norm(shape) if part.ends else None
        self.head = Linear(shape.width, shape.vocabulary, bias=False) if part.ends and not shape.tied else None
        self.rotary = (
            Rotary(sequence=shape.sequence, head_width=shape.head_width, theta=shape.rope_theta, scaling=shape.rope)
            if shape.positions == "rope"
            else None
        )
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_trained(name, shape))

    def forward(
        self,
        tokens_bt: Tensor,
        positions_bt: Tensor | None = None,
        documents: Documents | None = None,
        cache: Cache | None = None,
        stream_nd: Tensor | None = None,
        counted_n: Tensor | None = None,
        numbers_n: Tensor | None = None,
    ) -> Tensor:
        """The stream [B × T, width] after this part: after the final norm, before the head, where the model ends here.

        A part that does not begin with the embedding takes the stream that the part before it gave. Positions count
        from 0 in each row (from the cache's length where there is one) unless given; documents need them given,
        restarting with each document. `counted_n` says which tokens enter the loss, for experts' loads; None: all;
        `numbers_n` which tokens of the run they are, for experts that were chosen before.
        """
        if positions_bt is None:
            positions_bt = row_positions(tokens_bt, first=cache.length if cache is not None else 0)
        hidden_nd = self._enter(tokens_bt, positions_bt) if stream_nd is None else stream_nd
        rows = Rows(
            rows=tokens_bt.shape[0],
            tokens=tokens_bt.shape[1],
            rotation=self.rotary(positions_bt, hidden_nd.dtype) if self.rotary is not None else None,
            documents=documents.on(hidden_nd.device, longest=self.shape.sequence) if documents is not None else None,
            cache=cache,
            counted_n=counted_n,
            numbers_n=numbers_n,
        )
        for layer in self.layers.values():
            hidden_nd = layer(hidden_nd, rows)
        if cache is not None:
            cache.length += rows.tokens
        return hidden_nd if self.norm is None else self.norm(hidden_nd)

    def _enter(self, tokens_bt: Tensor, positions_bt: Tensor) -> Tensor:
        assert self.embed is not None, "this part of the model begins with the stream of the part before it"
        return self.embed(tokens_bt, positions_bt)

    def logits(self, hidden_nd: Tensor) -> Tensor:
        """Scores of every vocabulary entry, [N, vocabulary]."""
        return F.linear(hidden_nd, self.head_weight())

    def head_weight(self) -> Tensor:
        """The head's matrix [vocabulary, width], for losses that work through it in pieces; the embedding when tied."""
        if self.head is not None:
            return self.head.weight
        assert self.embed is not None and self.norm is not None, "this part of the model has no head"
        return self.embed.tokens.weight


class Embedding(nn.Module):
    """Token embedding, plus learned position embeddings if the shape has them."""

    def __init__(self, shape: ModelShape, part: ModelPart) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        learned = shape.positions == "learned" and part.embeds
        self.positions = nn.Embedding(shape.size_of("positions"), shape.width) if learned else None

    def forward(self, tokens_bt: Tensor, positions_bt: Tensor) -> Tensor:
        """The stream [B × T, width]."""
        embedded_btd = self.tokens(tokens_bt)
        if self.positions is not None:
            embedded_btd = embedded_btd + self.positions(positions_bt)
        return embedded_btd.flatten(0, 1)


class Layer(nn.Module):
    """Attention, then feed-forward or a mixture of experts, each on a normed copy and added to the stream.

    `run` may be replaced by a function with the same result, for example one that recomputes in the backward pass.
    """

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape, layer)
        self.feedforward_norm = make_norm(shape)
        mixture = shape.mixture_of(layer)
        self.feedforward = FeedForward(shape) if mixture is None else Mixture(shape, mixture)
        self.run: RunLayer = run_layer

    def forward(self, stream_nd: Tensor, rows: Rows) -> Tensor:
        return self.run(self, stream_nd, rows)


RunLayer = Callable[[Layer, Tensor, Rows], Tensor]
"""(layer, stream_nd, rows) to the layer's output stream."""


def run_layer(layer: Layer, stream_nd: Tensor, rows: Rows) -> Tensor:
    """What a layer computes."""
    stream_nd = stream_nd + layer.attention(layer.attention_norm(stream_nd), rows)
    normed_nd = layer.feedforward_norm(stream_nd)
    if isinstance(layer.feedforward, Mixture):
        return stream_nd + layer.feedforward(normed_nd, rows)
    return stream_nd + layer.feedforward(normed_nd)


def mixtures_of(part: GPT) -> dict[int, Mixture]:
    """The mixtures of a part of a model, by the numbers of their layers."""
    found = {int(number): layer.feedforward for number, layer in part.layers.items() if isinstance(layer, Layer)}
    return {number: one for number, one in found.items() if isinstance(one, Mixture)}


def reset_biases(part: GPT) -> None:
    """Set the biases of all routers to zero, as they begin: a model that was given memory has none yet."""
    for one in mixtures_of(part).values():
        one.router.balance.zero_()


def row_positions(tokens_bt: Tensor, first: int = 0) -> Tensor:
    """Positions first, first + 1, … as [1, T]: the same for every row."""
    return torch.arange(first, first + tokens_bt.shape[1], device=tokens_bt.device).unsqueeze(0)
