"""Bytes of what plait's own programs hold of one micro-batch on a processor, piece by piece, in float32.

Read off the code that makes them: model/ (what autograd saves), trainer/loss.py,
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
"""How many logits the loss makes at a time on a processor (trainer/loss.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSizes:
    """Bytes on one rank; of a micro-batch, where nothing else is said."""

    stream: Reals
    """The residual stream, of which a rank of `tensor` has its rows only."""
    every: Reals
    """Bytes of the stream over all rows where tensor parallelism gathers it; 0 where it is the same tensor as
    `stream`."""
    gathered: Reals
    """The same where it is another tensor than `stream`, else nothing."""
    wide: Reals
    """One product of the feedforward's width."""
    layer: Reals
    """What a layer keeps from its forward pass to its backward pass, its input included."""
    turned: Reals
    """What a layer keeps between the two halves of a split backward pass."""
    forward: Reals
    """What the end of a layer's forward pass holds beside."""
    backward: Reals
    """What the begin of a layer's backward pass holds beside, at most."""
    scores: Reals
    """Logits that exist at once."""
    table: Reals
    """One vocabulary table, or its gradient; of the model, as all that follow."""
    widest: Reals
    """A layer's largest weight."""
    layer_gradients: Reals
    """As they are kept: a part where parameters are split."""
    table_gradients: Reals
    layer_weights: Reals


def tensor_sizes(w: Workload, c: Candidates) -> TensorSizes:
    """The pieces of a dense model's micro-batch."""
    t, number = c.tensor, FLOAT32_BYTES * local_tokens(w, c)
    stream, every = number * w.width / t, number * w.width
    gathered, wide = np.where(t > 1, every, 0.0), number * w.ffn / t
    attention = number * w.head_width * 2 * (w.heads / t + np.maximum(w.kv_heads / t, 1))
    sums = number * (w.heads / t + 2 / t)  # attention's logsumexp, the norms' scales
    bent = 4 if w.gated else 2  # SwiGLU: gate, up, silu of the gate, and their product; else up and what it bends to
    # The streams before attention and before the feedforward; the normed inputs of their products; attention.
    whole = 2 * stream + 2 * every + attention + sums + bent * wide
    # "selective" keeps the stream, what products give, and attention's outcome.
    kept = {"none": whole, "selective": whole - stream - bent / 2 * wide, "full": stream}
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
        turned=4 * every + attention + (bent / 2 + 1) * wide,
        # `gathered`: a product's result before the ranks' addends are summed.
        forward=np.where(full, 2 * every + (bent - 1) * wide, stream + 2 * gathered),
        backward=stream + gathered + bent / 2 * wide + whole - layer,
        scores=_scores(w.vocabulary / t, local_tokens(w, c)),
        table=table,
        widest=FLOAT32_BYTES * w.width * max(w.ffn, w.heads * w.head_width) / t,
        layer_gradients=weights / split,
        table_gradients=table / split,
        layer_weights=weights,
    )


def _scores(entries: Reals, tokens: Reals) -> Reals:
    """The loss works in pieces, and the one before is let go when the next one is made."""
    first = np.minimum(np.maximum(1.0, LOGITS_AT_ONCE // entries), tokens)
    return FLOAT32_BYTES * entries * (first + np.minimum(first, tokens - first))
