"""What programs and models of published runs have and plait does not: priced so that forecasts can be held against
those runs (benchmarks/published), and without effect on a plan of plait's own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.planner.calibration.constants import constant
from plait.planner.problem.candidates import Counts, Reals


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherProgram:
    """What a training program does that plait does not; the defaults are what plait does."""

    straggler_share: float = 0.0
    """Share of a step lost to stragglers, for each doubling of the number of nodes."""
    all_reduces_shards: bool = False
    """Whether gradients are summed to everyone although each rank keeps a shard of them: twice the traffic."""
    selective_products: float = 0.0
    """Share of the forward products that selective recomputation repeats beside what attention keeps."""
    layer_pieces: float = 1.0
    """Messages that one layer's parameters, or gradients, are sent in over the data axes."""
    offloaded: float = 0.0
    """Share of the optimizer's state and of what recomputed layers keep that waits in the host's memory."""
    bucket_bytes: float = 0.0
    """Flat copies of gradients and parameters on their way, where the optimizer is sharded."""
    scores_backward: float = 1.3
    """Traffic per attention score of the backward pass over that of the forward pass, where attention is not fused."""
    drops_scores: bool = True
    """Whether dropout follows the softmax where attention is not fused."""
    divides_stream: bool = True
    """Whether the ranks of a tensor group divide the stream between their products (sequence parallelism)."""
    sends_one_at_a_time: bool = False
    """Whether a rank of a pipeline waits for each message before it sends or receives the next one: ranks between two
    neighbours wait for four messages of a micro-batch, the first and the last rank for two."""
    gradients_held_bytes: int = 0
    """Bytes that a parameter's gradients take where they are held more than once; 0: as `gradient_bytes`."""


PLAIT_ITSELF = OtherProgram()


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLayers:
    """What some of a model's layers are that plait does not train; by default none is."""

    expert_width: int = 0
    """Width in which experts take and return tokens where it is not the model's (latent experts); 0: the same."""
    attending_layers: int = -1
    """Layers that compute attention scores, where some do not (state-space hybrids); -1: all of them."""
    scanning_layers: int = 0
    """Layers that pass a state along the sequence (Mamba 2) in place of attention."""
    window: int = 0
    """Keys that a local layer looks back on, 0: all of them."""
    local_layers: int = 0
    """Layers whose attention sees only the window."""

    def keys_per_query(self, layers: int, sequence: int) -> float:
        """Number of keys per query without the causal mask, averaged over all layers."""
        attending = layers if self.attending_layers < 0 else self.attending_layers
        seen = min(self.window or sequence, sequence)
        return (sequence * (attending - self.local_layers) + 2 * seen * self.local_layers) / layers


PLAIN_LAYERS = OtherLayers()
STATE_SPACE_SCAN_BYTES = constant("scanned_bytes")
"""A state-space layer's scan, as the traffic that would take as long, per token and unit of its inner width (twice the
model's): kernels that are far from both limits. Set by hand between 70 and 190 on all Nemotron 3 rows, both halves."""

FUSED_SOFTMAX_MATRICES = 4
"""Matrices of scores that Megatron-LM's fused masked softmax takes at a time."""
UNFUSED_SOFTMAX_KERNELS = constant("softmax_kernels")
"""What a masked softmax in single steps launches more than one in one kernel, as means of a forward pass and half a
backward one: casts, scale, mask, copies. Fitted on the even half of vTrain's and BLOOM's rows."""


def unfused_softmax_kernels(matrices: Counts) -> Reals:
    """Additional kernels per layer for this many matrices of scores, where attention is not fused and the fused masked
    softmax does not apply.

    It takes four matrices at a time (Megatron-LM, `FusedScaleMaskSoftmax.is_kernel_available`).
    """
    return np.where(matrices % FUSED_SOFTMAX_MATRICES > 0, UNFUSED_SOFTMAX_KERNELS, 0.0)


def published_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage as published programs divide them.

    Where the layers do not divide, but would with the embedding and the head counted as one layer each, they are
    divided so (Llama 3's 126 layers over 8 × 8 stages, BLOOM's 70 over 12); else some stages hold one layer more than
    others, the first and the last not among them if that can be helped.
    """
    each, more = divmod(layers, stages)
    if stages > 1 and more and (layers + 2) % stages == 0:
        each, more = (layers + 2) // stages - 1, stages - 2
    favoured = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), -stage))[:more]
    return tuple(each + (stage in favoured) for stage in range(stages))
