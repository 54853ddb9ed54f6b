"""Bytes of each tensor that a plait rank on a processor holds for one micro-batch, in float32.

The sizes follow from the code that allocates the tensors: model/ (what autograd saves), trainer/loss.py,
parallel/pipeline/deferred_gradients.py, recompute.py.

Legend: n tokens of a micro-batch on one rank, t degree of the axis `tensor`; arrays over candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.planner.problem.candidates import RECOMPUTE_MODES, SHARDED_STATES, Candidates, Reals
from plait.planner.problem.workload import Workload
from plait.planner.step_time.roofline import local_tokens

FLOAT32_BYTES = 4
LOGITS_AT_ONCE = 2**21
"""Number of logits that the loss computes at a time on a processor (trainer/loss.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSizes:
    """Bytes on one rank, arrays over candidates; from `table` on per model, all others per micro-batch."""

    stream: Reals
    """The residual stream on one rank; with tensor parallelism a rank has only its share of the tokens."""
    every: Reals
    """The residual stream with all tokens; equal to `stream` without tensor parallelism."""
    gathered: Reals
    """`every` where tensor parallelism gathers the stream into a second tensor; else 0."""
    wide: Reals
    """The result of one product with the feedforward's width."""
    layer: Reals
    """Activations that a layer keeps for its backward pass, its input included."""
    turned: Reals
    """Tensors that a layer keeps between the two halves of a split backward pass."""
    forward: Reals
    """Temporary tensors at the end of a layer's forward pass."""
    backward: Reals
    """Temporary tensors at the start of a layer's backward pass, at most."""
    scores: Reals
    """Logits in memory at a time: the loss works in pieces."""
    table: Reals
    """One vocabulary table (embedding or head), or its gradient."""
    widest: Reals
    """A layer's largest weight."""
    layer_gradients: Reals
    """Gradients of one layer on this rank; divided by `shard` where parameters are sharded."""
    table_gradients: Reals
    layer_weights: Reals


def tensor_sizes(w: Workload, c: Candidates) -> TensorSizes:
    """The pieces of a dense model's micro-batch."""
    t, number = c.tensor, FLOAT32_BYTES * local_tokens(w, c)
    stream, every = number * w.width / t, number * w.width
    gathered, wide = np.where(t > 1, every, 0.0), number * w.ffn / t
    attention = number * w.head_width * 2 * (w.heads / t + np.maximum(w.kv_heads / t, 1))
    sums = number * (w.heads / t + 2 / t)  # attention's logsumexp, the norms' scales
    wide_kept = 4 if w.gated else 2  # SwiGLU: gate, up, silu(gate) and their product; else up and its activation
    # The streams before attention and before the feedforward; the normed inputs of their products; attention.
    whole = 2 * stream + 2 * every + attention + sums + wide_kept * wide
    # "selective" keeps the stream, what products give, and attention's outcome.
    kept = {"none": whole, "selective": whole - stream - wide_kept / 2 * wide, "full": stream}
    layer = np.choose(c.recompute, [kept[way] for way in RECOMPUTE_MODES])
    full = c.recompute == RECOMPUTE_MODES.index("full")
    split = np.where((c.shard > 1) & (c.shard_what == SHARDED_STATES.index("parameters")), c.shard, 1)
    weights = FLOAT32_BYTES * (w.attention_parameters + w.dense_feedforward_parameters) / t
    table = FLOAT32_BYTES * w.embedding_parameters / t
    return TensorSizes(
        stream=stream,
        every=every,
        gathered=gathered,
        wide=wide,
        layer=layer,
        # Inputs of products (two normed streams, attention's result, the feedforward's), and gradients of results.
        turned=4 * every + attention + (wide_kept / 2 + 1) * wide,
        # `gathered`: a product's result before the ranks' addends are summed.
        forward=np.where(full, 2 * every + (wide_kept - 1) * wide, stream + 2 * gathered),
        backward=stream + gathered + wide_kept / 2 * wide + whole - layer,
        scores=_scores(w.vocabulary / t, local_tokens(w, c)),
        table=table,
        widest=FLOAT32_BYTES * w.width * max(w.ffn, w.heads * w.head_width) / t,
        layer_gradients=weights / split,
        table_gradients=table / split,
        layer_weights=weights,
    )


def _scores(entries: Reals, tokens: Reals) -> Reals:
    """Bytes of the logits in memory: the loss works in pieces, and frees one only after the next one is computed."""
    first = np.minimum(np.maximum(1.0, LOGITS_AT_ONCE // entries), tokens)
    return FLOAT32_BYTES * entries * (first + np.minimum(first, tokens - first))
