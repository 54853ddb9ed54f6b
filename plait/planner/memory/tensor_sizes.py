"""Bytes of each tensor that a plait rank on a processor holds for one micro-batch, in float32 or in 16 bits.

The sizes follow from the code that allocates the tensors: model/ (what autograd saves), trainer/loss.py,
parallel/pipeline.py, recompute.py. In bfloat16 the products' inputs and results take two bytes a
number, and so do copies of weights; the residual stream, weights and gradients stay float32.

Legend: n tokens of a micro-batch on one rank, t degree of the axis `tensor`; arrays over candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.planner.memory.activations import FLOAT32_BYTES, HOST_UNFUSED_SCORES, block_bytes, kept_logsumexps
from plait.planner.problem.candidates import RECOMPUTE_MODES, SCHEDULES, Candidates, Counts, Reals
from plait.planner.problem.stage_partition import micro_batches_per_step
from plait.planner.problem.trained_weights import (
    adapter_parameters,
    dequantized_parameters,
    dropped_numbers,
    local_target_sizes,
)
from plait.planner.problem.workload import Workload
from plait.planner.step_time.roofline import local_tokens

LOGITS_AT_ONCE = 2**21
"""Number of logits that the loss computes at a time on a processor (trainer/loss.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSizes:
    """Bytes on one rank, arrays over candidates; from `table` on per model, all others per micro-batch."""

    stream: Reals
    """The residual stream on one rank; with tensor parallelism a rank has only its share of the tokens."""
    product: Reals
    """The input or the result of a product of the model's width, with all tokens."""
    gathered: Reals
    """`product` where tensor parallelism gathers the stream into a second tensor; else 0."""
    wide: Reals
    """The result of one product with the feedforward's width."""
    layer: Reals
    """Activations that a layer keeps for its backward pass, its input and rounded copies of its weights included."""
    turned: Reals
    """Tensors that a layer keeps between the two halves of a split backward pass."""
    forward: Reals
    """Temporary tensors at the end of a layer's forward pass."""
    backward: Reals
    """Temporary tensors at the start of a layer's backward pass, at most."""
    scores: Reals
    """Logits in memory at a time: the loss works in pieces."""
    loss_copies: Reals
    """Rounded copies beside the logits: of the hidden states, of the head, and a piece's gradient of the head."""
    rounded_once: Reals
    """Rounded copies of a layer's weights that autocast remembers until the forward pass ends, where the layer does not
    keep them for its backward pass; else 0."""
    table: Reals
    """The gradient of one vocabulary table (embedding or head) before it is added to others; 0 where both are
    frozen."""
    table_weights: Reals
    """The embedding, or a head that learns."""
    head_weights: Reals
    """The head where it has a table of its own."""
    widest: Reals
    """A layer's largest gradient of a weight when it is made, with its rounded copy."""
    fresh_layer: Reals
    """All gradients of a layer while they are scattered, where parameters are sharded; else 0."""
    layer_gradients: Reals
    """Gradients of one layer on this rank; divided by `shard` where parameters are sharded."""
    table_gradients: Reals
    layer_trained: Reals
    """The weights of one layer that learn: all, or its adapters'."""
    layer_weights: Reals
    gathered_weights: Reals
    """A layer's weights as they are gathered where parameters are sharded."""


def tensor_sizes(w: Workload, c: Candidates) -> TensorSizes:
    """The pieces of a dense model's micro-batch."""
    t, number = c.tensor, w.element_bytes * local_tokens(w, c)
    stream, every = FLOAT32_BYTES * local_tokens(w, c) * w.width / t, FLOAT32_BYTES * local_tokens(w, c) * w.width
    product, narrow = number * w.width, w.element_bytes < FLOAT32_BYTES
    gathered, wide = np.where(t > 1, product, 0.0), number * w.ffn / t
    attention = _attention_sizes(w, t, number)
    # Attention's logsumexp, the norms' scales.
    sums = kept_logsumexps(w, c) + FLOAT32_BYTES * local_tokens(w, c) * (2 + w.post_norms) / t
    wide_kept = 4 if w.gated else 2  # SwiGLU: gate, up, silu(gate) and their product; else up and its activation
    own = _weight_sizes(w, c)
    fully = c.gathers_weights
    # Gathered weights are rounded already, and a deferred product rounds its weight for itself alone.
    deferred = c.schedule == SCHEDULES.index("zero-bubble")
    rounded = np.where(fully | deferred | (not narrow), 0.0, own["layer_trained"] / 2)
    # The streams before attention and before the feedforward; the normed inputs of their products; attention.
    whole = 2 * stream + product + attention["kept"] + sums + wide_kept * wide
    whole = whole + w.post_norms * stream  # what they norm, in float32
    whole = whole + number * w.adapter_rank * len(w.adapter_targets)  # between an adapter's two products
    # What dropout leaves of an input is made again in the backward pass, unless the product is deferred.
    every_input, one_input = dropped_numbers(w, c)
    dropped = (number + local_tokens(w, c)) * every_input
    whole = whole + np.where(deferred, dropped, 0.0)
    # "selective" keeps the stream, what products give, and attention's outcome.
    # Of a layer with an adapter both its own product and the sum of both.
    twice = number * sum((outputs for _, outputs in local_target_sizes(w, c)), np.zeros(len(c)))
    thinned = stream + 2 * product + attention["products"] + sums + (wide_kept - wide_kept / 2) * wide
    thinned = thinned + number * w.adapter_rank * len(w.adapter_targets) + twice
    kept = {"none": whole + rounded, "selective": thinned, "full": stream}
    layer = np.choose(c.recompute, [kept[way] for way in RECOMPUTE_MODES])
    none, selective, full = (c.recompute == RECOMPUTE_MODES.index(way) for way in RECOMPUTE_MODES)
    recomputed = whole + np.where(selective, twice, 0.0)
    # A norm's result is in memory beside its rounded copy as long as the products run.
    unrounded = every / t if narrow else 0.0
    _, largest = dequantized_parameters(w, c)
    read = w.element_bytes * largest + block_bytes(w, c, HOST_UNFUSED_SCORES) + number * one_input
    return TensorSizes(
        stream=stream,
        product=product,
        gathered=gathered,
        wide=wide,
        layer=layer,
        # Inputs of products (two normed streams, attention's result, the feedforward's), and gradients of results.
        turned=3 * product + attention["turned"] + (wide_kept / 2 + 1) * wide,
        # `gathered`: a product's result before the ranks' addends are summed.
        forward=np.where(full, 2 * product + (wide_kept - 1) * wide, (product if narrow else stream) + 2 * gathered)
        + unrounded
        + read,
        backward=stream + gathered + wide_kept / 2 * wide + recomputed + rounded - layer + product * narrow + read,
        scores=_scores(w, t, local_tokens(w, c)),
        loss_copies=(product + _head_copies(w, own) - fully * w.rounds_gathered_head * w.head_learns * own["table"] / 2)
        * narrow,
        rounded_once=np.where(none, 0.0, rounded),
        **own,
    )


def _attention_sizes(w: Workload, t: Counts, number: Reals) -> dict[str, Reals]:
    """Bytes that attention keeps, of which its input counts for all but "products": for the backward pass, where it is
    computed again but for its products and its core, and between the halves of a split backward pass."""
    if w.latent is not None:
        sizes = {"kept": w.latent.kept(t), "products": w.latent.products_kept(t), "turned": w.latent.turned(t)}
        return {name: number * size for name, size in sizes.items()}
    heads = number * w.head_width * 2 * (w.heads / t + np.maximum(w.kv_heads / t, 1))
    states = FLOAT32_BYTES * number / w.element_bytes * w.delta_numbers / t
    return {"kept": number * w.width + heads + states, "products": heads, "turned": number * w.width + heads}


def _weight_sizes(w: Workload, c: Candidates) -> dict[str, Reals]:
    """Bytes of weights and their gradients on one rank, by the names of TensorSizes' fields."""
    t, narrow = c.tensor, w.element_bytes < FLOAT32_BYTES
    whole = w.latent.whole_weights if w.latent else 0
    matrices = (w.attention_parameters + w.dense_feedforward_parameters - whole) / t + whole
    adapters = FLOAT32_BYTES * adapter_parameters(w, c)
    # Frozen matrices are kept as they are multiplied, or in blocks (parallel/frozen.py); all that learns in float32.
    weights = (w.matrix_bytes if w.is_frozen else FLOAT32_BYTES) * matrices + adapters
    trained = adapters if w.is_frozen else weights
    table = FLOAT32_BYTES * w.embedding_parameters / t
    learns = table if w.embedding_learns or w.head_learns else 0.0 * table
    fully = c.gathers_weights
    split = np.where(fully & ~keeps_whole_gradients(w, c), c.shard, 1)
    sides = [w.adapter_rank * np.maximum(*both) for both in local_target_sizes(w, c)]
    attention = w.latent.widest if w.latent else w.width * w.heads * w.head_width
    widest = np.maximum.reduce(sides) if sides else max(w.width * w.ffn, attention) / t
    return {
        "table": learns,
        "table_weights": table,
        "head_weights": table / 2 if narrow and not (w.tied or w.head_learns) else table,
        "widest": (FLOAT32_BYTES + w.element_bytes * narrow) * widest,
        "fresh_layer": np.where(fully, trained * (1 + w.element_bytes / FLOAT32_BYTES), 0.0),
        "layer_gradients": trained / split,
        "table_gradients": learns / split,
        "layer_trained": trained,
        "layer_weights": weights,
        "gathered_weights": w.matrix_bytes * matrices + w.element_bytes * adapter_parameters(w, c),
    }


def keeps_whole_gradients(w: Workload, c: Candidates) -> NDArray[np.bool_]:
    """Mask of candidates that split weights and keep whole gradients, in float32, from one micro-batch to the next."""
    return c.sums_once & (micro_batches_per_step(w, c) > 1)


def _head_copies(w: Workload, own: Mapping[str, Reals]) -> Reals:
    """Bytes of the head's rounded copy, unless it is kept so, and where it learns of the rounded gradient of a
    piece."""
    return own["head_weights"] - own["table_weights"] / 2 + w.head_learns * own["table"] / 2


def _scores(w: Workload, t: Counts, tokens: Reals) -> Reals:
    """Bytes of the logits in memory: the loss works in even pieces, one at a time.

    In bfloat16 each piece is there in float32 and besides as the product gave it, or as its rounded gradient.
    """
    entries = w.vocabulary / t
    pieces = np.ceil(tokens / np.maximum(1.0, LOGITS_AT_ONCE // entries))
    narrow = w.element_bytes if w.element_bytes < FLOAT32_BYTES else 0
    return (FLOAT32_BYTES * (1 + w.capped_logits) + narrow) * entries * np.ceil(tokens / pieces)
