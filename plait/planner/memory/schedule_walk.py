"""The moments of a rank's step at which it may hold most, found by walking through the list of its actions.

What is counted is what trainer/step.py, parallel/pipeline/stage.py and parallel/pipeline/stage_links.py hold; the list
is partition/pipeline_schedule.py's. A moment tells how many of each of memory_pieces.Pieces there are, so that one walk
serves models of all sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.partition.pipeline_schedule import Action

MESSAGES_AT_ONCE = 4
"""Buffers for results of other ranks before they are needed, and own results that are kept until they were sent
(parallel/pipeline/stage_links.py)."""

WalkedItem = Literal["gradients", "activations", "logits", "buffers"]
"""Gradients in memory of their own; what backward needs; the loss's logits and the gradients that it made; messages
under way and what one operation hands to the next."""
TensorSize = Literal[
    "stream", "every", "gathered", "wide", "layer", "turned", "forward", "backward", "scores", "table", "widest",
    "layer_gradients", "table_gradients",
]  # fmt: skip
WALKED_ITEMS: tuple[WalkedItem, ...] = ("gradients", "activations", "logits", "buffers")
TENSOR_SIZES: tuple[TensorSize, ...] = TensorSize.__args__  # type: ignore[attr-defined]
HeldTensors = Counter[tuple[WalkedItem, TensorSize]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStages:
    """What a walk must know of the pipeline beside a rank's list; one stage where there is none."""

    layers: tuple[int, ...]
    """Layers of each stage, over all ranks."""
    tied: bool
    flat_layers: bool
    """Whether gradients of layers are summed over ranks, and so move into flat buckets at the end."""
    flat_tables: bool
    """Whether gradients of vocabulary tables are summed over ranks, and so move into flat buckets at the end."""

    @property
    def last(self) -> int:
        return len(self.layers) - 1

    def tables(self, stage: int) -> int:
        """Vocabulary tables that a stage holds."""
        return 1 if self.tied and not self.last else (stage == 0) + (stage == self.last)


def fullest_moments(own: Sequence[Action], stages: PipelineStages) -> NDArray[np.float64]:
    """[moments, items, pieces]: those of a rank's list that may be the fullest for some sizes of the pieces."""
    walk = _Walk(own, stages)
    for action in own:
        match action.kind:
            case "forward":
                walk.forward(action)
            case "backward-weight":
                walk.weights(action)
            case _:
                walk.backward(action)
    found = np.zeros((len(walk.met), len(WALKED_ITEMS), len(TENSOR_SIZES)))
    for number, moment in enumerate(walk.met):
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
    """What is held after the actions so far, and the moments that were met."""

    def __init__(self, own: Sequence[Action], stages: PipelineStages) -> None:
        self.met: set[frozenset[tuple[tuple[WalkedItem, TensorSize], float]]] = set()
        self._stages = stages
        self._now: HeldTensors = Counter()
        self._grown: set[tuple[int, TensorSize]] = set()
        self._closing = {action.stage: action for action in own if action.kind == "backward"}
        self._to_come = sum(self._is_received(action) for action in own)
        self._sent = 0

    def forward(self, action: Action) -> None:
        """Layers, and behind the last of them the loss."""
        self._to_come -= self._is_received(action)
        self._now["activations", "layer"] += self._stages.layers[action.stage]
        self._meet({("buffers", "forward"): 1, ("buffers", "stream"): 1})
        if action.stage < self._stages.last:
            return self._send()
        # The final norm keeps what it took; what it gave goes as soon as the loss made its gradient.
        self._now["activations", "stream"] += 1
        self._now["logits", "every"] += 1
        self._now["logits", "table"] += 1
        return self._meet({("logits", "scores"): 1, ("buffers", "stream"): 1, ("buffers", "gathered"): 1})

    def backward(self, action: Action) -> None:
        """The layers' way back, whole or, in a split backward pass, without the gradients of their weights."""
        now, stages, stage = self._now, self._stages, action.stage
        layers, split = stages.layers[stage], action.kind == "backward-input"
        last = self._closing.get(stage) == action
        self._to_come -= self._is_received(action)
        if stage == stages.last:
            self._meet({("buffers", "stream"): 3})
            now["activations", "stream"] -= 1
            now["logits", "every"] -= 1
        self._begin_of_way_back("split" if split else "whole")
        now["activations", "layer"] -= layers
        now["activations", "turned"] += layers * split
        if not split:
            self._grow("layer_gradients", stage, layers, flat=stages.flat_layers and last)
        # When the first of its layers is being left.
        left: TensorSize = "turned" if split else "layer"
        self._meet({("activations", "layer"): 1, ("activations", left): -split, ("buffers", "stream"): 1})
        if stage == 0:
            self._meet({("buffers", "stream"): 1, ("buffers", "table"): 1})
        self._grow("table_gradients", stage, stages.tables(stage), flat=stages.flat_tables and last)
        now["logits", "table"] -= stage == stages.last
        if stage > 0:
            self._send()

    def weights(self, action: Action) -> None:
        """The gradients of the weights that a split backward pass put off, product by product."""
        layers = self._stages.layers[action.stage]
        self._grow("layer_gradients", action.stage, layers, flat=False)
        self._now["activations", "turned"] -= layers
        self._meet({("activations", "turned"): 1})

    def _begin_of_way_back(self, kind: Literal["whole", "split"]) -> None:
        """Through the last of the layers: its feedforward's products are the widest of all that backward makes."""
        self._meet({("buffers", "backward"): 1})
        if kind == "whole":
            self._meet({("buffers", "backward"): 1, ("buffers", "wide"): -1, ("buffers", "widest"): 1})

    def _grow(self, piece: TensorSize, stage: int, count: int, *, flat: bool) -> None:
        """Gradients that were not there before; or, on the last way back, those that leave for their flat buckets."""
        fresh = (stage, piece) not in self._grown
        self._grown.add((stage, piece))
        self._now["gradients", piece] += (fresh - flat) * count

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
        self._meet({})
        self._sent = min(self._sent, MESSAGES_AT_ONCE)

    def _meet(self, beside: dict[tuple[WalkedItem, TensorSize], int]) -> None:
        """A moment at which so much is held beside what is kept."""
        moment = Counter(self._now)
        moment["buffers", "stream"] += self._sent + min(MESSAGES_AT_ONCE, self._to_come)
        for place, count in beside.items():
            moment[place] += count
        self.met.add(frozenset((place, float(count)) for place, count in moment.items() if count))
