"""Lets a layout's tokens go to the experts that they went to in one process, and says by how much it would have chosen
otherwise.

Note [replayed]: a tie between two experts, or a rounding, sends a token elsewhere in another layout, and then nothing
that follows is comparable, with no mistake on either side. So a proof compares gradients on one routing, that of the
one process; and a layout's own choice, made from its own scores and biases, beside it: it may differ only where the
scores of what was chosen do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.model.mixture import Mixture
from plait.model.parts.mixture import MixtureShape
from plait.model.router import best_experts, group_scores

Passes = Literal["training", "held-out"]
"""The split of the data to which passes belong; each split is counted separately."""


class RoutingRecord:
    """The experts of every token of some steps, by layer: recorded on one process, replayed on a layout's ranks."""

    def __init__(self, mixtures: Mapping[int, Mixture], replayed: Path | None) -> None:
        self.passes: Passes = "training"
        self.regret: dict[int, Tensor] = {layer: torch.zeros(1, dtype=torch.float64) for layer in mixtures}
        """By layer, how much better than what was replayed a rank's own choice was, at most: see `regret_of`."""
        self._replayed = None if replayed is None else load_file(replayed)
        self._found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for layer, mixture in mixtures.items():
            mixture.router.choose = partial(self._choose, layer, mixture.shape_of_mixture)

    def save(self, path: Path) -> None:
        """Write what was recorded; raises AssertionError where a token's experts are not known."""
        tables = {}
        for key, found in self._found.items():
            numbers, chosen = (torch.cat(some) for some in zip(*found, strict=True))
            table = torch.full((int(numbers.max()) + 1, chosen.shape[1]), -1, dtype=torch.int32)
            table[numbers] = chosen
            assert (table >= 0).all(), "every token of a step has passed"
            tables[key] = table
        save_file(tables, path)

    def _choose(
        self, layer: int, mixture: MixtureShape, choice_ne: Tensor, best_nk: Tensor, numbers_n: Tensor
    ) -> Tensor:
        key, known_n = f"{self.passes}/{layer}", numbers_n >= 0
        if self._replayed is None:
            self._found.setdefault(key, []).append((numbers_n[known_n].cpu(), best_nk[known_n].int().cpu()))
            return best_nk
        replayed_nk = self._replayed[key][numbers_n.clamp(min=0).cpu()].to(best_nk)
        taken_nk = torch.where(known_n.unsqueeze(1), replayed_nk, best_nk)
        worst = regret_of(choice_ne, taken_nk, mixture).double().cpu().reshape(1)
        self.regret[layer] = torch.maximum(self.regret[layer], worst)
        return taken_nk


def regret_of(choice_ne: Tensor, taken_nk: Tensor, mixture: MixtureShape) -> Tensor:
    """How far the experts that were taken are from the best by these scores, of the token where that is most: the
    difference of the scores, rank by rank; or, where a group was closed to it, that of the groups' scores."""
    best_nk = best_experts(choice_ne, mixture)
    best, taken = (choice_ne.gather(1, some).sort(dim=1).values for some in (best_nk, taken_nk))
    behind_n = (best - taken).amax(dim=1)
    if mixture.groups_chosen < mixture.groups:
        scores_ng = group_scores(choice_ne, mixture)
        last_n = scores_ng.topk(mixture.groups_chosen, dim=1).values[:, -1]
        met_nk = taken_nk // (mixture.experts // mixture.groups)
        group_behind_n = (last_n.unsqueeze(1) - scores_ng.gather(1, met_nk)).amax(dim=1)
        # In a group that a tie has closed the experts may be better than those of the open one.
        behind_n = torch.where(group_behind_n > 0, group_behind_n, behind_n)
    return behind_n.clamp(min=0).amax()
