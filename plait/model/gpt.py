"""The decoder: embedding, layers, final norm, head.

Legend: b rows of the batch, t tokens of a row, n all tokens one row after the other, d numbers of the model's width.
The residual stream is flat, [N, width]: code that splits tokens over ranks need not know rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.model.attention import Cache, Documents, Rows
from plait.model.dropout import input_salt, layer_noise, token_noise
from plait.model.feedforward import FeedForward, activated
from plait.model.latent_attention import make_attention
from plait.model.linear import Linear, to_compute_precision
from plait.model.mixture import Mixture
from plait.model.names import EMBEDDING, HEAD, layer_of
from plait.model.norm import RMSNorm, make_last_norm, make_norm, norm_offset
from plait.model.prediction_heads import AheadInput, AuxiliaryHead, MicroObjectives, hand_over
from plait.model.rope_scaling import WindowRope
from plait.model.rotary import Rotary
from plait.model.shape import ModelPart, ModelShape, whole_model
from plait.model.weights import heads_in, holds_weight, is_trained, kept_values, rotary_width


class GPT(nn.Module):
    """A language model of the given shape, or a part of it; its weights are uninitialized (see init.py), and those that
    do not learn ask for no gradient.

    Layers are in a dict keyed by their global number, so that a part of the model keeps the weights' names. `embed` is
    None in a part without the embedding, `norm` in a part without the end, `head` in a part without an output matrix.
    Layers for prediction ahead follow the last one; they and heads in the middle run only where objectives are given.
    """

    def __init__(self, shape: ModelShape, part: ModelPart | None = None) -> None:
        super().__init__()
        part = part or whole_model(shape)
        self.shape = shape
        self.part = part
        ahead = shape.objectives.depths if part.ends else ()
        # A tied head needs the embedding's weight, wherever it is.
        self.embed = Embedding(shape, part) if holds_weight(part, EMBEDDING, shape) else None
        numbers = (*part.layers, *(self.layer_of_depth(depth) for depth in ahead))
        self.layers = nn.ModuleDict({str(layer): Layer(shape, layer) for layer in numbers})
        self.norm = make_last_norm(shape) if part.ends else None
        self.head = Linear(shape.width, shape.vocabulary, bias=False) if holds_weight(part, HEAD, shape) else None
        self.auxiliary = nn.ModuleDict({str(after): AuxiliaryHead(shape) for after in heads_in(part, shape)})
        self.ahead = nn.ModuleDict({str(depth): AheadInput(shape) for depth in ahead})
        self.lenders: tuple[GPT, ...] = ()
        """Parts on the same rank that hold the tables which this one borrows; no modules of this one."""
        self.rotary, self.window_rotary = make_rotaries(shape, shape.sequence)
        self.dropout_seed = 0
        """Of adapters' dropout, which a training run sets."""
        for name, module in self.layers.named_modules():
            if isinstance(module, Linear) and module.dropout:
                module.salt = input_salt(name.partition(".")[2])
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
        objectives: MicroObjectives | None = None,
    ) -> Tensor:
        """The stream [B × T, width] after this part: after the final norm, before the head, where the model ends here.

        A part that does not begin with the embedding takes the stream that the part before it gave. Positions count
        from 0 in each row (from the cache's length where there is one) unless given; documents need them given,
        restarting with each document. `counted_n` says which tokens enter the loss, for experts' loads; None: all;
        `numbers_n` which tokens of the run they are, for experts that were chosen before, and for adapters' dropout,
        which there is only where these are known and gradients are wanted. With `objectives` the
        backward pass of the result is that of their losses, too.
        """
        if positions_bt is None:
            positions_bt = row_positions(tokens_bt, first=cache.length if cache is not None else 0)
        hidden_nd = self._enter(tokens_bt, positions_bt) if stream_nd is None else stream_nd
        inputs_nld = self._layer_inputs(tokens_bt, hidden_nd) if self.shape.layer_input_width else None
        rows = Rows(
            rows=tokens_bt.shape[0],
            tokens=tokens_bt.shape[1],
            rotation=self.rotary(positions_bt, hidden_nd.dtype) if self.rotary is not None else None,
            window_rotation=None if self.window_rotary is None else self.window_rotary(positions_bt, hidden_nd.dtype),
            query_growth=query_growth(self.shape, positions_bt, hidden_nd.dtype),
            documents=documents.on(hidden_nd.device, longest=self.shape.sequence, positions_bt=positions_bt)
            if documents is not None
            else None,
            cache=cache,
            counted_n=counted_n,
            numbers_n=numbers_n,
            positions_bt=positions_bt if self.shape.delta is not None else None,
        )
        inputs = () if inputs_nld is None else inputs_nld.unbind(1)
        noise_n = self._noise(numbers_n)
        for number in self.part.layers:
            own = replace(rows, layer_input=inputs[number]) if inputs else rows
            if noise_n is not None:
                own = replace(own, noise_n=layer_noise(noise_n, number))
            hidden_nd = self.layers[str(number)](hidden_nd, own)
            if objectives is not None and str(number + 1) in self.auxiliary:
                head, loss = self.auxiliary[str(number + 1)], objectives.losses[f"layer_{number + 1}"]
                hidden_nd = head(hidden_nd, self.head_weight(), loss)
        if cache is not None:
            cache.length += rows.tokens
        if self.norm is None:
            # A head returns a view, and torch's sharding hooks onto a part's result, which must be none.
            ends_in_head = objectives is not None and str(max(self.part.layers, default=-1) + 1) in self.auxiliary
            return hidden_nd.clone() if ends_in_head else hidden_nd
        if objectives is not None:
            hidden_nd = self._predict_ahead(hidden_nd, rows, objectives)
        return self.norm(hidden_nd)

    def _predict_ahead(self, carrier_nd: Tensor, rows: Rows, objectives: MicroObjectives) -> Tensor:
        """The last layer's stream, whose backward hands over the losses of all depths, each of which reads the one
        before."""
        hidden_nd = carrier_nd
        for depth, (name, own) in enumerate(self.ahead.items()):
            assert isinstance(own, AheadInput)
            hidden_nd = own(hidden_nd, objectives.following_bt[depth], self._look_up)
            counted_n = objectives.counted_n[depth] if objectives.counted_n else None
            hidden_nd = self.layers[str(self.layer_of_depth(depth + 1))](hidden_nd, replace(rows, counted_n=counted_n))
            loss = objectives.losses[f"ahead_{name}"]
            carrier_nd = hand_over(carrier_nd, hidden_nd, self.head_weight(), own.norm, loss)
        return carrier_nd

    def _noise(self, numbers_n: Tensor | None) -> Tensor | None:
        """The tokens' hashes for adapters' dropout; None where nothing is dropped."""
        if self.shape.adapter is None or not self.shape.adapter.dropout:
            return None
        if numbers_n is None or not torch.is_grad_enabled():
            return None
        return token_noise(numbers_n, self.dropout_seed)

    def layer_of_depth(self, depth: int) -> int:
        """The number of the layer that predicts `depth` tokens beyond the next."""
        return self.shape.layers + depth - 1

    def _look_up(self, tokens_bt: Tensor) -> Tensor:
        (embed,) = (one.embed for one in (self, *self.lenders) if one.embed is not None)
        found_nd: Tensor = embed.look_up(tokens_bt)
        return found_nd

    def _enter(self, tokens_bt: Tensor, positions_bt: Tensor) -> Tensor:
        assert self.embed is not None, "this part of the model begins with the stream of the part before it"
        return self.embed(tokens_bt, positions_bt)

    def _layer_inputs(self, tokens_bt: Tensor, hidden_nd: Tensor) -> Tensor:
        assert self.embed is not None, (
            "layers' inputs are made of the embedding, and the layers are in one part with it"
        )
        inputs_nld: Tensor = self.embed.layer_inputs(tokens_bt, hidden_nd)
        return inputs_nld

    def logits(self, hidden_nd: Tensor) -> Tensor:
        """Scores of every vocabulary entry, [N, vocabulary]."""
        return capped(F.linear(hidden_nd, self.head_weight()), self.shape.logit_cap)

    def head_weight(self) -> Tensor:
        """The head's matrix [vocabulary, width], for losses that work through it in pieces; the embedding when tied."""
        for one in (self, *self.lenders):
            if one.head is not None:
                return one.head.weight
            if self.shape.tied and one.embed is not None:
                return one.embed.tokens.weight
        raise AssertionError("this part of the model has no head")

    def tables(self) -> list[nn.Module]:
        """The modules of the vocabulary tables that this part computes with, borrowed ones included."""
        return [table for one in (self, *self.lenders) for table in (one.embed, one.head) if table is not None]


def _table(rows: int, width: int) -> nn.Embedding:
    """An embedding as nn.Embedding draws it; on the meta device there is nothing to draw, but torch would import more
    than a second of its compiler for it."""
    numbers = torch.empty(rows, width)
    return nn.Embedding.from_pretrained(numbers if numbers.is_meta else numbers.normal_(), freeze=False)


class Embedding(nn.Module):
    """Token embedding, plus learned position embeddings if the shape has them."""

    def __init__(self, shape: ModelShape, part: ModelPart) -> None:
        super().__init__()
        self.tokens = _table(shape.vocabulary, shape.width)
        learned = shape.positions == "learned" and part.embeds
        self.positions = _table(shape.size_of("positions"), shape.width) if learned else None
        self.multiplier = shape.embedding_multiplier
        each, has_inputs = shape.layer_input_width, shape.layer_input_width > 0 and part.embeds
        self.layer_tokens = _table(shape.vocabulary, each * shape.layers) if has_inputs else None
        self.layer_projection = Linear(shape.width, each * shape.layers, bias=False) if has_inputs else None
        self.layer_norm = RMSNorm(each, shape.norm_eps, offset=norm_offset(shape)) if has_inputs else None

    def forward(self, tokens_bt: Tensor, positions_bt: Tensor) -> Tensor:
        """The stream [B × T, width]."""
        embedded_nd = self.look_up(tokens_bt)
        if self.positions is None:
            return embedded_nd
        embedded_btd = embedded_nd.unflatten(0, tokens_bt.shape) + self.positions(positions_bt)
        return embedded_btd.flatten(0, 1)

    def look_up(self, tokens_bt: Tensor) -> Tensor:
        """The tokens' embeddings [B × T, width], without positions."""
        embedded_btd: Tensor = self.tokens(tokens_bt)
        if self.multiplier != 1.0:
            embedded_btd = embedded_btd * self.multiplier
        return embedded_btd.flatten(0, 1)

    def layer_inputs(self, tokens_bt: Tensor, embedded_nd: Tensor) -> Tensor:
        """What each layer is given of its own, [n, layers, width of it], from the tokens and their embeddings."""
        assert self.layer_tokens is not None and self.layer_projection is not None and self.layer_norm is not None
        looked_up_nd = self.layer_tokens(tokens_bt).flatten(0, 1)
        return joined_layer_inputs(looked_up_nd, embedded_nd, self.layer_projection, self.layer_norm)


def joined_layer_inputs(looked_up_nd: Tensor, embedded_nd: Tensor, projection: Linear, norm: RMSNorm) -> Tensor:
    """The inputs of all layers [n, layers, width of it] from both their parts: rows of a table of their own, times the
    root of that width, and a projection of the embedding, over the root of the model's width and normed (Gemma 4)."""
    width = norm.weight.numel()
    projected_nd = projection(to_compute_precision(embedded_nd)) * embedded_nd.shape[-1] ** -0.5
    projected_nld = norm(projected_nd.unflatten(1, (-1, width)))
    return (projected_nld + looked_up_nd.unflatten(1, (-1, width)) * width**0.5) * 2**-0.5


class LayerInput(nn.Module):
    """Adds to the stream what a layer is given of its own: weighed by the stream, projected and normed (Gemma 4)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = Linear(shape.width, shape.layer_input_width, bias=False)
        self.projection = Linear(shape.layer_input_width, shape.width, bias=False)
        self.norm = make_norm(shape)
        self.activation = shape.activation

    def forward(self, stream_nd: Tensor, input_nd: Tensor) -> Tensor:
        weighed_nd = activated(self.activation, self.gate(to_compute_precision(stream_nd)), input_nd)
        added_nd: Tensor = self.norm(self.projection(to_compute_precision(weighed_nd)))
        return stream_nd + added_nd


class Layer(nn.Module):
    """Attention, then feed-forward or a mixture of experts, each on a normed copy and added to the stream; or each
    normed after, or before and after.

    `run` may be replaced by a function with the same result, for example one that recomputes in the backward pass.
    """

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        before, after = shape.norm_places != "after", shape.norm_places != "before"
        self.attention_norm = make_norm(shape) if before else nn.Identity()
        self.attention = make_attention(shape, layer)
        self.attention_post_norm = make_norm(shape) if after else nn.Identity()
        self.feedforward_norm = make_norm(shape) if before else nn.Identity()
        mixture = shape.mixture_of(layer)
        self.feedforward = FeedForward(shape.at(layer)) if mixture is None else Mixture(shape, mixture)
        self.feedforward_post_norm = make_norm(shape) if after else nn.Identity()
        self.inputs = LayerInput(shape) if shape.layer_input_width else None
        self.multiplier: Tensor | None
        self.register_buffer("multiplier", torch.ones(1) if shape.layer_multipliers else None, persistent=False)
        self.residual_multiplier = shape.residual_multiplier
        self.run: RunLayer = run_layer

    def forward(self, stream_nd: Tensor, rows: Rows) -> Tensor:
        return self.run(self, stream_nd, rows)


RunLayer = Callable[[Layer, Tensor, Rows], Tensor]
"""(layer, stream_nd, rows) to the layer's output stream."""


def run_layer(layer: Layer, stream_nd: Tensor, rows: Rows) -> Tensor:
    """What a layer computes."""
    share = layer.residual_multiplier
    attended_nd = layer.attention(layer.attention_norm(stream_nd), rows)
    stream_nd = torch.add(stream_nd, layer.attention_post_norm(attended_nd), alpha=share)
    normed_nd = layer.feedforward_norm(stream_nd)
    if isinstance(layer.feedforward, Mixture):
        inner_nd = layer.feedforward(normed_nd, rows)
    else:
        inner_nd = layer.feedforward(normed_nd, rows.noise_n)
    stream_nd = torch.add(stream_nd, layer.feedforward_post_norm(inner_nd), alpha=share)
    if layer.inputs is not None:
        stream_nd = layer.inputs(stream_nd, rows.layer_input)
    return stream_nd if layer.multiplier is None else stream_nd * layer.multiplier.to(stream_nd.dtype)


def capped(scores: Tensor, cap: float) -> Tensor:
    """Scores of the vocabulary's entries, capped where `cap` is not 0 (ModelShape.logit_cap)."""
    return (scores / cap).tanh() * cap if cap else scores


def mixtures_of(part: GPT) -> dict[int, Mixture]:
    """The mixtures of a part of a model, by the numbers of their layers."""
    found = {int(number): layer.feedforward for number, layer in part.layers.items() if isinstance(layer, Layer)}
    return {number: one for number, one in found.items() if isinstance(one, Mixture)}


def reset_kept_values(part: GPT) -> None:
    """Set the biases of all routers to zero and the multipliers of all layers to one, as they begin: a model that was
    given memory has none yet."""
    for one in mixtures_of(part).values():
        one.router.balance.zero_()
    for layer in part.layers.values():
        if isinstance(layer, Layer) and layer.multiplier is not None:
            layer.multiplier.fill_(1.0)


def kept_in(part: GPT) -> dict[str, Tensor]:
    """The vectors that no gradient changes of a part of a model, by name: weights.kept_values."""
    names = kept_values(part.shape)
    return {name: part.get_buffer(name) for name in names if str(layer_of(name)) in part.layers}


def share_kept_values(source: GPT, into: GPT) -> None:
    """Give a model the vectors of another one that no gradient changes."""
    for name, values in kept_in(source).items():
        path, _, leaf = name.rpartition(".")
        setattr(into.get_submodule(path), leaf, values)


def make_rotaries(shape: ModelShape, sequence: int) -> tuple[Rotary | None, Rotary | None]:
    """The rotary positions of all layers, and separate ones for layers with a window if the shape has them, for up to
    this many tokens."""
    if shape.positions != "rope":
        return None, None
    width, own, full = rotary_width(shape), shape.window_rope, shape.full_attention
    if own is None and full is not None:  # unlike heads, turned by the same angles
        own = WindowRope(theta=shape.rope_theta, scaling=shape.rope)
    everywhere = Rotary(
        sequence=sequence, head_width=full.head_width if full else width, theta=shape.rope_theta, scaling=shape.rope
    )
    if own is None:
        return everywhere, None
    return everywhere, Rotary(sequence=sequence, head_width=width, theta=own.theta, scaling=own.scaling)


def query_growth(shape: ModelShape, positions_bt: Tensor, dtype: torch.dtype) -> Tensor | None:
    """What queries are multiplied by at each position, [B or 1, T, 1, 1]: 1 + growth × ln(1 + how often `after` fits
    into the position), as Llama 4 and Ministral 3 do. None where nothing grows."""
    if not shape.query_growth:
        return None
    times = (positions_bt // shape.query_growth_after).to(torch.promote_types(dtype, torch.float32))
    return (1.0 + shape.query_growth * times.log1p())[:, :, None, None]


def row_positions(tokens_bt: Tensor, first: int = 0) -> Tensor:
    """Positions first, first + 1, … as [1, T]: the same for every row."""
    return torch.arange(first, first + tokens_bt.shape[1], device=tokens_bt.device).unsqueeze(0)
