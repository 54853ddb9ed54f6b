"""Finds the moments of a step at which a rank's memory may peak, by walking through its list of actions.

The walk counts the tensors that trainer/step.py, parallel/pipeline.py and parallel/pipeline_links.py hold;
the list is from partition/pipeline_schedule.py. A moment is a count of each tensor of tensor_sizes.TensorSizes, so one
walk serves models of all sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from plait.partition.pipeline_schedule import Action

MESSAGES_AT_ONCE = 4
"""Largest number of receive buffers posted in advance, and of own results kept until they are sent
(parallel/pipeline_links.py)."""

WalkedItem = Literal["gradients", "activations", "logits", "buffers", "gathered"]
"""Items of memory. gradients: those in tensors of their own; activations: tensors kept for the backward pass; logits:
those of the loss, and the gradients that it computes; buffers: messages in flight and temporary tensors; gathered:
sharded weights of layers, gathered whole."""
TensorSize = Literal[
    "stream", "product", "gathered", "wide", "layer", "turned", "forward", "backward", "scores", "loss_copies",
    "rounded_once", "table", "widest", "fresh_layer", "layer_gradients", "table_gradients", "gathered_weights",
]  # fmt: skip
WALKED_ITEMS: tuple[WalkedItem, ...] = ("gradients", "activations", "logits", "buffers", "gathered")
TENSOR_SIZES: tuple[TensorSize, ...] = TensorSize.__args__  # type: ignore[attr-defined]
HeldTensors = defaultdict[tuple[WalkedItem, TensorSize], float]
HeldBeside = Mapping[tuple[WalkedItem, TensorSize], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStages:
    """What a walk needs besides a rank's list of actions; a model without a pipeline is one stage."""

    layers: tuple[Any, ...]
    """Layers of each stage, over all ranks; on the last with those for prediction ahead, no whole number."""
    tied: bool
    flat_layers: bool
    """Whether gradients of layers are summed over ranks, and so add up in flat buckets."""
    flat_tables: bool
    """Whether gradients of vocabulary tables are summed over ranks, and so add up in flat buckets."""
    middle_heads: tuple[tuple[int, ...], ...] = ()
    """For each stage its heads in the middle, each by the layers of the stage behind it; empty: there are none."""
    ahead: int = 0
    """Depths of prediction ahead, on the last stage."""
    gathered: float = 0.0
    """Layers whose sharded weights are gathered at a time."""
    keeps_gathered: bool = False
    """Whether these stay gathered from the step's first forward to its last backward."""
    embedding_learns: bool = True
    head_learns: bool = True

    @property
    def last(self) -> int:
        return len(self.layers) - 1

    def learning_tables(self, *stages: int) -> int:
        """Vocabulary tables with a gradient on a rank with these stages."""
        scores = any(one == self.last or bool(self.middle_heads and self.middle_heads[one]) for one in stages)
        looks_up = any(one == 0 or (one == self.last and self.ahead > 0) for one in stages)
        if self.tied:
            return int((scores or looks_up) and self.embedding_learns)
        return (scores and self.head_learns) + (looks_up and self.embedding_learns)

    def handed_over(self, stage: int) -> list[int]:
        """The losses that a stage's backward pass computes, in its order, each by the layers behind it."""
        middle = sorted(self.middle_heads[stage]) if self.middle_heads else []
        return [0] * (self.ahead if stage == self.last else 0) + middle


def fullest_moments(own: Sequence[Action], stages: PipelineStages) -> NDArray[np.float64]:
    """Shape [moments, items, tensors]: counts of tensors at each moment that may be the peak for some tensor sizes."""
    walk = _Walk(own, stages)
    for action in own:
        match action.kind:
            case "forward":
                walk.forward(action)
            case "backward-weight":
                walk.weights(action)
            case _:
                walk.backward(action)
    found = np.zeros((len(walk.moments), len(WALKED_ITEMS), len(TENSOR_SIZES)))
    for number, moment in enumerate(walk.moments):
        for (item, piece), count in moment:
            found[number, WALKED_ITEMS.index(item), TENSOR_SIZES.index(piece)] = count
    return found[_undominated(found.sum(axis=1))]


def _undominated(totals: NDArray[np.float64]) -> list[int]:
    kept: list[int] = []
    for one in np.argsort(-totals.sum(axis=1)):
        if not any((totals[other] >= totals[one]).all() for other in kept):
            kept.append(int(one))
    return kept


class _Walk:
    """Tensors held after the actions so far, and all moments that were recorded."""

    def __init__(self, own: Sequence[Action], stages: PipelineStages) -> None:
        self.moments: set[frozenset[tuple[tuple[WalkedItem, TensorSize], float]]] = set()
        self._stages = stages
        self._now: HeldTensors = defaultdict(float)
        self._grown: set[tuple[int, TensorSize]] = set()
        self._to_come = sum(self._is_received(action) for action in own)
        self._sent = 0

    def forward(self, action: Action) -> None:
        """Forward pass of a stage: its layers, and on the last stage the loss."""
        self._to_come -= self._is_received(action)
        layers = self._stages.layers[action.stage]
        self._now["activations", "layer"] += layers
        self._record_moment({("buffers", "forward"): 1, ("buffers", "stream"): 1, ("buffers", "rounded_once"): layers})
        if action.stage < self._stages.last:
            return self._send()
        # The final norm keeps its input; its output is freed as soon as the loss has computed its gradient. Heads of
        # prediction ahead keep theirs.
        self._now["activations", "stream"] += 1 + self._stages.ahead
        self._now["logits", "product"] += 1
        self._now["logits", "table"] += self._stages.head_learns
        return self._record_moment(
            {
                ("logits", "scores"): 1,
                ("logits", "loss_copies"): 1,
                ("buffers", "stream"): 1,
                ("buffers", "gathered"): 1,
                ("gathered", "gathered_weights"): -self._freed_after_forward,
            }
        )

    @property
    def _freed_after_forward(self) -> float:
        """Gathered layers that are freed before the loss."""
        return 0.0 if self._stages.keeps_gathered else self._stages.gathered

    def backward(self, action: Action) -> None:
        """Backward pass of a stage; in a split backward pass, without the gradients of the weights."""
        now, stages, stage = self._now, self._stages, action.stage
        layers, split = stages.layers[stage], action.kind == "backward-input"
        self._to_come -= self._is_received(action)
        if stage == stages.last:
            self._record_moment({("buffers", "stream"): 3})
            now["activations", "stream"] -= 1 + stages.ahead
            now["logits", "product"] -= 1
        self._heads(stage)
        self._start_of_backward("split" if split else "whole")
        now["activations", "layer"] -= layers
        now["activations", "turned"] += layers * split
        if not split:
            self._grow("layer_gradients", stage, layers)
        # The end of the backward pass of the stage's first layer.
        left: TensorSize = "turned" if split else "layer"
        self._record_moment({("activations", "layer"): 1, ("activations", left): -split, ("buffers", "stream"): 1})
        if stage == 0:
            # Where one table has both uses, autograd adds the head's and the embedding's gradients in a third tensor.
            tables = stages.embedding_learns * (1 + (stages.tied and not stages.last))
            self._record_moment({("buffers", "stream"): 1, ("buffers", "table"): tables})
        self._grow("table_gradients", stage, stages.learning_tables(stage))
        now["logits", "table"] -= stage == stages.last and stages.head_learns
        if stage > 0:
            self._send()

    def weights(self, action: Action) -> None:
        """The delayed gradients of a stage's weights in a split backward pass, product by product."""
        layers = self._stages.layers[action.stage]
        self._grow("layer_gradients", action.stage, layers)
        self._now["activations", "turned"] -= layers
        self._record_moment({("activations", "turned"): 1})

    def _heads(self, stage: int) -> None:
        """The losses that a stage's backward pass computes: beside the gradient of the output matrix that a head makes,
        there is the sum of those of the heads before it."""
        for number, behind in enumerate(self._stages.handed_over(stage)):
            logits: HeldBeside = {
                ("logits", "scores"): 1, ("logits", "loss_copies"): 1, ("logits", "product"): 1,
                ("logits", "table"): 1 + (number > 0 and stage < self._stages.last),
            }  # fmt: skip
            left: HeldBeside = {("activations", "layer"): -behind, ("buffers", "stream"): 3, ("buffers", "gathered"): 1}
            self._record_moment({**logits, **left})

    def _start_of_backward(self, kind: Literal["whole", "split"]) -> None:
        """Backward pass of the stage's last layer, whose feedforward products are the widest tensors of all."""
        self._record_moment({("buffers", "backward"): 1})
        if kind == "whole":
            self._record_moment({("buffers", "backward"): 1, ("buffers", "wide"): -1, ("buffers", "widest"): 1})
            self._record_moment({("buffers", "stream"): 2, ("buffers", "fresh_layer"): 1, ("activations", "layer"): -1})

    def _grow(self, piece: Literal["layer_gradients", "table_gradients"], stage: int, count: float) -> None:
        """Add gradients that did not exist yet; those that are summed over ranks have their place in flat buckets."""
        flat = self._stages.flat_layers if piece == "layer_gradients" else self._stages.flat_tables
        if not flat and (stage, piece) not in self._grown:
            self._grown.add((stage, piece))
            self._now["gradients", piece] += count

    def _is_received(self, action: Action) -> bool:
        match action.kind:
            case "forward":
                return action.stage > 0
            case "backward-weight":
                return False
            case _:
                return action.stage < self._stages.last

    def _send(self) -> None:
        self._sent += 1
        self._record_moment({})
        self._sent = min(self._sent, MESSAGES_AT_ONCE)

    def _record_moment(self, beside: HeldBeside) -> None:
        """Record a moment with these temporary tensors besides those that are kept."""
        moment = defaultdict(float, self._now)
        moment["gathered", "gathered_weights"] += self._stages.gathered
        moment["buffers", "stream"] += self._sent + min(MESSAGES_AT_ONCE, self._to_come)
        for place, count in beside.items():
            moment[place] += count
        self.moments.add(frozenset((place, float(count)) for place, count in moment.items() if count))
