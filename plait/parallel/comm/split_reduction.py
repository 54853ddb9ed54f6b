"""FSDP2's gathers and scatters between processors by point-to-point messages, in place of gloo's slower collectives.

See Note [room first] in collectives.py. torch allows both to be replaced (FSDPModule.set_custom_all_gather); it passes
as the input of a gather the slice of the output where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from plait.parallel.comm.collectives import SPREAD_TAG, SUM_TAG, spread_own, sum_parts

NO_BUCKET_LIMIT = timedelta(0)
"""No timeout, in torch's convention."""


class AllWork(dist.Work):
    """Several transfers as one torch Work."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = NO_BUCKET_LIMIT) -> bool:
        """Block until all are over; each may take as long."""
        for work in self._works:
            work.wait(timeout)
        return True


class _OrdinaryMemory:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An ordinary tensor, as torch's own gather and scatter allocate it."""
        return torch.empty(*size, dtype=dtype, device=device)


class SpreadWeights(_OrdinaryMemory):
    """FSDP2's all-gather: a unit's weights from the parts of all ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather in place: the input lies in the output."""
        begun = AllWork(spread_own(output_tensor, group, SPREAD_TAG))
        if not async_op:
            begun.wait()
        return begun if async_op else None


class SwapGradients(_OrdinaryMemory):
    """FSDP2's reduce-scatter: this rank's part of the sum of a unit's gradients."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Sum over the ranks; blocks, as torch requires here."""
        assert op == dist.ReduceOp.SUM and not async_op, "gradients are sums everywhere: Note [loss is a sum]"
        sum_parts(output_tensor, input_tensor, group, SUM_TAG)
