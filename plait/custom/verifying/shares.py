"""Every worker's share of a batch, brought to each worker, and joined to the whole batch where that can be done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.custom.cutting import batch_size
from plait.custom.data.moving import mapped
from plait.custom.group import Workers
from plait.errors import PlaitError

MOST_DIMS = 16


def gather_shares(batch: Any, workers: Workers) -> list[Any]:
    """The shares of all workers in rank order, this worker's own being `batch`. Every worker must call it; blocks.

    What is no tensor is taken from this worker's own share. Raises PlaitError where shares have unlike tensors.
    """
    if workers.size == 1:
        return [batch]
    own = list(tensors_of(batch))
    counts = workers.sums.gather(torch.tensor([len(own)], device=workers.device))
    if len({int(count) for count in counts}) > 1:
        raise PlaitError("the workers' shares of this batch hold unlike numbers of tensors; verify a batch of tensors")
    gathered = [_gather_tensor(tensor, workers) for tensor in own]
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


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, in the order of its members; a numpy array counts as one."""
    found: list[Tensor] = []
    mapped(batch, lambda tensor: found.append(tensor) or tensor)
    return iter(found)


def _rebuilt(batch: Any, tensors: Sequence[Tensor]) -> Any:
    """A batch of the same kind with other tensors."""
    rest = iter(tensors)
    return mapped(batch, lambda _: next(rest))


def _gather_tensor(tensor: Tensor, workers: Workers) -> list[Tensor]:
    """A tensor of each worker; they may differ in their sizes."""
    if tensor.dim() > MOST_DIMS:
        raise PlaitError(f"a tensor of {tensor.dim()} dims in a batch; verify takes {MOST_DIMS} at most")
    sizes = [tensor.dim(), *tensor.shape, *[0] * (MOST_DIMS - tensor.dim())]
    shapes = [
        tuple(one[1 : 1 + one[0]].tolist()) for one in workers.sums.gather(torch.tensor(sizes).to(workers.device))
    ]
    size = tensor.element_size()
    most = max(torch.Size(shape).numel() for shape in shapes)
    room = torch.zeros(most * size, dtype=torch.uint8, device=workers.device)
    room[: tensor.numel() * size] = tensor.detach().contiguous().view(-1).view(torch.uint8).to(workers.device)
    parts = workers.sums.gather(room)
    return [
        part[: torch.Size(shape).numel() * size].clone().view(tensor.dtype).view(shape).to(tensor.device)
        for part, shape in zip(parts, shapes, strict=True)
    ]
