"""The parts in which a worker computes its share of a batch: as many as were asked for, where it can."""

from __future__ import annotations

from typing import Any

import torch

from plait.custom.cutting import BatchCut, batch_parts, batch_size
from plait.custom.exact_norm.batch_norm import GlobalBatchNorm
from plait.custom.group import Workers
from plait.custom.layouts.description import CustomLayout
from plait.custom.program import Program
from plait.errors import PlaitError


class ShareParts:
    """Cuts shares into `program.accumulate` parts.

    A share of fewer examples has fewer parts. Where workers wait for each other inside of a forward pass (plait's own
    BatchNorm, sharded parameters, rows that a loss gathers) all of them take as many as the smallest share has: else
    they would wait for ever.
    """

    def __init__(self, program: Program, workers: Workers, layout: CustomLayout, cut: BatchCut | None) -> None:
        self._wanted, self._workers, self._cut = program.accumulate, workers, cut
        together = layout == "shard parameters" or program.additive == "no" or _has_global_norms(program)
        self.waits_within = workers.size > 1 and together
        """Whether workers wait for each other inside of a forward pass."""
        self._together = self.waits_within and program.accumulate > 1
        self._said = False

    def of_share(self, batch: Any) -> list[Any]:
        """The parts of this worker's share, none of a share without examples. Every worker must call it; blocks where
        workers wait for each other: then all take as many parts, of a share without examples one without examples."""
        if not self._together:
            return [] if self.is_empty(batch) and not self.waits_within else batch_parts(batch, self._wanted, self._cut)
        own = torch.tensor([-max(1, min(self._wanted, batch_size(batch, self._cut)))])
        count = -int(self._workers.sums.largest(own))
        if count < self._wanted and not self._said:
            self._said = True
            self._workers.say(
                f"the smallest share of a batch has {count} example{'s' * (count != 1)}, so each share is computed in "
                f"{count} part{'s' * (count != 1)}, not in accumulate = {self._wanted}"
            )
        return batch_parts(batch, count, self._cut)

    def is_empty(self, batch: Any) -> bool:
        """Whether this worker has no example of a batch, as only a short one that several share out can be."""
        try:
            return self._workers.size > 1 and batch_size(batch, self._cut) == 0
        except PlaitError:
            return False


def _has_global_norms(program: Program) -> bool:
    return any(isinstance(module, GlobalBatchNorm) for model in program.models for module in model.modules())
