"""Every worker's share of a batch, brought to each worker, and joined to the whole batch where that can be done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.custom.cutting import batch_size
from plait.custom.group import Workers
from plait.custom.structure import mapped, tensors_of
from plait.errors import PlaitError
from plait.parallel.exchange import gather_json, gather_tensors


def gather_shares(batch: Any, workers: Workers) -> list[Any]:
    """The shares of all workers in rank order, this worker's own being `batch`. Every worker must call it; blocks.

    What is no tensor is taken from this worker's own share. Raises PlaitError where shares have unlike tensors.
    """
    if workers.size == 1:
        return [batch]
    own = list(tensors_of(batch))
    if len(set(gather_json(len(own), workers.sums))) > 1:
        raise PlaitError("the workers' shares of this batch hold unlike numbers of tensors; verify a batch of tensors")
    gathered = [gather_tensors(tensor, workers.sums) for tensor in own]
    return [_rebuilt(batch, [every[rank] for every in gathered]) for rank in range(workers.size)]


def join_shares(shares: Sequence[Any]) -> Any | None:
    """The whole batch: tensors one behind the other along dim 0. None where a share is not cut along dim 0 alone, as
    where graphs are joined to one; a share has its own numbers of nodes in its edges."""
    if len(shares) == 1:
        return shares[0]
    try:
        sizes = [batch_size(share) for share in shares]
    except PlaitError:
        return None
    joined = []
    for parts in zip(*(tensors_of(share) for share in shares), strict=True):
        if not parts[0].dim():
            if any(not torch.equal(part, parts[0]) for part in parts):
                return None
            joined.append(parts[0])
            continue
        if [len(part) for part in parts] != sizes or len({part.shape[1:] for part in parts}) > 1:
            return None
        joined.append(torch.cat(parts))
    return _rebuilt(shares[0], joined)


def _rebuilt(batch: Any, tensors: Sequence[Tensor]) -> Any:
    """A batch of the same kind with other tensors."""
    rest = iter(tensors)
    return mapped(batch, lambda _: next(rest))
