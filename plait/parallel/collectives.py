"""Moves between ranks: two collectives under torch's new names, and what goes point to point where gloo is slow.

torch renamed the two in 2.13 and warns of their old names; plait runs from 2.11 on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# The arguments' order is the same under both names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""all_gather(whole, own, group=…, async_op=…): every rank's own tensor, one after the other."""
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""reduce_scatter(own, whole, group=…, async_op=…): this rank's part of the sum of everybody's whole."""

SUM_TAG, SPREAD_TAG, HEADER_TAG = 0, 1, 2
"""Tags of messages between ranks of `tensor`, and of `shard` with sharded parameters; no others have tags so low."""


MessageBegin = Callable[[int], tuple[int, Callable[[], None]]]
"""Called when a message of this many numbers begins; returns its tag, and what is to be called before the message is
waited for."""


# Note [room first]: gloo sends only once the other side has said that it has room, and that word queues behind whatever
# travels its way. Where several messages follow each other, the receives of all of them begin before the first send;
# gloo's own all-gather and all-to-all often send in one direction after the other.


def swap_parts(whole: Tensor, received: Tensor, group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    """Begin to send every other rank its part of `whole`, and to receive what they have of this rank's.

    `received` [ranks - 1, part] holds the others' in rank order. gloo's reduce-scatter sums it all on every rank, its
    all-to-all copies the own part as well: messages from rank to rank move what must move, and nothing else.
    """
    return [*expect_parts(received, group, tag), *send_parts(whole, group, tag)]


def expect_parts(received: Tensor, group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    """Post the receives of swap_parts, see Note [room first]."""
    pairs = zip(received, _others(group), strict=True)
    return [_work(dist.irecv(into, group=group, group_src=rank, tag=tag)) for into, rank in pairs]


def send_parts(whole: Tensor, group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    """The sends of swap_parts."""
    parts = _parts(whole, group)
    return [_work(dist.isend(parts[rank], group=group, group_dst=rank, tag=tag)) for rank in _others(group)]


def spread_own(whole: Tensor, group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    """Begin to send this rank's part of `whole` to all others, and to receive theirs in their places."""
    return [*expect_others(whole, group, tag), *send_own(whole, group, tag)]


def expect_others(whole: Tensor, group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    """Post the receives of spread_own, see Note [room first]."""
    parts = _parts(whole, group)
    return [_work(dist.irecv(parts[rank], group=group, group_src=rank, tag=tag)) for rank in _others(group)]


def send_own(whole: Tensor, group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    """The sends of spread_own."""
    own = _parts(whole, group)[dist.get_rank(group)]
    return [_work(dist.isend(own, group=group, group_dst=rank, tag=tag)) for rank in _others(group)]


def sum_parts(
    own: Tensor, whole: Tensor, group: dist.ProcessGroup, tag: int, compare: Callable[[], None] = lambda: None
) -> None:
    """Write the sum of everybody's parts of this rank to `own`, added up in the order of the ranks. Blocks.

    Where gloo stands for reduce_scatter(own, whole), which sums all parts on all ranks. `compare` is called once the
    messages are on their way, before they are waited for.
    """
    parts, index = _parts(whole, group), dist.get_rank(group)
    received = torch.empty_like(parts[1:])
    works = swap_parts(whole, received, group, tag)
    compare()
    for work in works:
        work.wait()
    first, second, *others = *received[:index], parts[index], *received[index:]
    flat = torch.add(first, second, out=own.view(-1))
    for other in others:
        flat += other


def _parts(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.view(dist.get_world_size(group), -1)


def _others(group: dist.ProcessGroup) -> list[int]:
    return [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


# Times messages from rank to rank, to find which of several links is slow.


ECHO_BYTES = 256 * 1024
"""More than a switch's buffers let through at once, and on 100 Mbit/s still done in 20 ms."""
ECHO_ROUNDS = 3


def message_from_before_s(message_bytes: int = ECHO_BYTES, rounds: int = ECHO_ROUNDS) -> float:
    """Least seconds of a message to this rank from the previous one (to rank 0 from the last rank).

    All ranks send to the next one at the same time. Every rank of the job must call it; blocks. Takes CPU tensors, and
    so the way between hosts that gloo takes.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    if count == 1:
        return 0.0
    sent, received = (torch.zeros(message_bytes, dtype=torch.uint8) for _ in range(2))
    took_s: list[float] = []
    for _ in range(rounds):
        dist.all_reduce(torch.zeros(1))  # all begin together: a rank that is late is no slow link
        began = time.perf_counter()
        arrival = dist.irecv(received, src=(rank - 1) % count)
        departure = dist.isend(sent, dst=(rank + 1) % count)
        assert arrival is not None and departure is not None
        arrival.wait()
        took_s.append(time.perf_counter() - began)
        departure.wait()
    return min(took_s)
