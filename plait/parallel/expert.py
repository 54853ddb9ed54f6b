"""`expert` (EP): each rank holds some experts of every mixture; tokens travel to the experts of other ranks and back.

A group is neighbouring ranks that see different tokens (those of `replicate`, `shard` and `context`, the last
innermost). It is no mesh axis: the world size stays the product of the other degrees. What `shard` splits of an expert
it splits over the ranks that hold that expert (`Layout.expert_shards`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from plait.layout import Layout, equal_share
from plait.model.gpt import mixtures_of
from plait.model.mixture import RunHeld, from_experts, order_by_expert, to_experts
from plait.parallel.mesh import PEER_TIMEOUT, connect_ranks
from plait.parallel.sharded_model import ShardedModel
from plait.parallel.watched import WATCH, PendingSpan
from plait.partition.execution import Execution


def hold_experts(sharded: ShardedModel, mesh: DeviceMesh, execution: Execution) -> ShardedModel:
    """Drop the experts that other ranks of this one's group hold; a degree of 1 leaves the model as it is. Every rank
    must call it."""
    layout, rank = execution.layout, dist.get_rank()
    if layout.expert == 1:
        return sharded
    # Separate groups: gloo takes one group's messages in the order in which they were begun, which is not the same
    # on all ranks where sums of gradients go on meanwhile.
    made = [(ranks, dist.new_group(list(ranks), timeout=PEER_TIMEOUT)) for ranks in expert_groups(layout)]
    (group,) = (group for ranks, group in made if rank in ranks)
    assert isinstance(group, dist.ProcessGroup)
    connect_ranks(group)
    experts = execution.shape.size_of("experts")
    shares = [equal_share(experts, layout.expert, index) for index in range(layout.expert)]
    first, count = shares[layout.expert_index(rank)]
    exchange = ExpertExchange(group=group, held=tuple(number for _, number in shares))
    for chunk in sharded.chunks:
        for mixture in mixtures_of(chunk).values():
            for name in [name for name in mixture.experts if not first <= int(name) < first + count]:
                del mixture.experts[name]
            mixture.run_all = exchange.run
    return sharded


def expert_groups(layout: Layout) -> list[tuple[int, ...]]:
    """The ranks of each group that holds all experts together, in the experts' order; the groups in an order that is
    the same on all ranks."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        key = (at["pipeline"], layout.place_among_tokens(rank) // layout.expert, at["tensor"])
        groups.setdefault(key, []).append(rank)
    return sorted(tuple(sorted(ranks, key=layout.expert_index)) for ranks in groups.values())


# Tokens to the ranks that hold their experts, and results back: counts first, then rows.
#
# Every rank of a group must run the same layers in the same order; a rank to which no token goes takes part with no
# rows.
#
# Note [begun and awaited]: rows leave in one function and are awaited in another, so that what lies between them, the
# shared experts, is computed while they travel. Backward runs the functions in the opposite order of their making, so
# that there the one that awaits begins, the shared experts' backward comes between, and the one that began awaits.
#
# Legend: r rows that this rank sends, in the order of experts; s rows that it receives; d numbers of a row.


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertExchange:
    """How one rank's rows reach all experts of a layer. Called on all ranks of the group, forward and backward."""

    group: dist.ProcessGroup
    held: tuple[int, ...]
    """Experts of each rank of the group, in the experts' order."""

    def run(self, rows_rd: Tensor, counts: tuple[int, ...], run_held: RunHeld, meanwhile: Callable[[], None]) -> Tensor:
        """The results of all experts for this rank's rows, which come in the order of experts, `counts` of each."""
        arriving = self._counts_of_others(counts, rows_rd.device)
        own = len(arriving[0])
        splits = _Splits(sent=self._sums(counts), received=tuple(sum(some) for some in arriving), group=self.group)
        under_way = _UnderWay()
        leaving_rd = _begun(rows_rd, splits, under_way)
        meanwhile()
        arrived_sd = _awaited(leaving_rd, splits, under_way)
        # They stand by sender, and within a sender by expert.
        lengths = torch.tensor([count for some in arriving for count in some], device=rows_rd.device)
        experts = torch.arange(own, device=rows_rd.device).repeat(len(arriving))
        # The size is given, so that the host need not wait for the GPU.
        experts_s = experts.repeat_interleave(lengths, output_size=len(arrived_sd))
        order = order_by_expert(experts_s.unsqueeze(1), own)
        results_sd = from_experts(run_held(to_experts(arrived_sd, order), order.counts), order).squeeze(1)
        under_way = _UnderWay()
        return _awaited(_begun(results_sd, splits.back(), under_way), splits.back(), under_way)

    def _sums(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Number of rows for each rank's experts."""
        firsts = [sum(self.held[:rank]) for rank in range(len(self.held))]
        return tuple(sum(counts[first : first + number]) for first, number in zip(firsts, self.held, strict=True))

    def _counts_of_others(self, counts: tuple[int, ...], device: torch.device) -> list[list[int]]:
        """For each rank of the group, the rows that it sends to each of this rank's experts."""
        own = self.held[dist.get_rank(self.group)]
        sent = torch.tensor(counts, dtype=torch.int64, device=device)
        received = sent.new_empty(own * len(self.held))
        with WATCH.exchange("counts", sent):
            dist.all_to_all_single(received, sent, [own] * len(self.held), list(self.held), group=self.group)
        return received.view(len(self.held), own).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Splits:
    """Rows to and from each rank of a group."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: dist.ProcessGroup

    def back(self) -> _Splits:
        return _Splits(sent=self.received, received=self.sent, group=self.group)


class _UnderWay:
    """Pending transfers of one exchange, of its forward or its backward."""

    def __init__(self) -> None:
        self._held: tuple[dist.Work, Tensor, Tensor, PendingSpan | None] | None = None

    def begin(self, rows_rd: Tensor, splits: _Splits) -> Tensor:
        """Send rows, and return where all ranks' rows for this one will be. They travel as bytes: gloo moves not every
        dtype."""
        rows_rd = rows_rd.contiguous()
        arriving_sd = rows_rd.new_empty(sum(splits.received), rows_rd.shape[1])
        whole = (arriving_sd.view(torch.uint8), rows_rd.view(torch.uint8))
        sizes = (list(splits.received), list(splits.sent))
        work = dist.all_to_all_single(*whole, *sizes, group=splits.group, async_op=True)
        assert work is not None and self._held is None
        begun = WATCH.begin("expert tokens", rows_rd)
        self._held = (work, rows_rd, arriving_sd, begun)  # the sent ones must live until they have left
        return arriving_sd

    def wait(self) -> Tensor:
        """The rows for this rank, once they have arrived and its own have left."""
        assert self._held is not None, "rows that no rank sent"
        work, _, arrived_sd, begun = self._held
        self._held = None
        with WATCH.wait("expert tokens", begun):
            work.wait()
        return arrived_sd


def _begun(rows_rd: Tensor, splits: _Splits, under_way: _UnderWay) -> Tensor:
    """The rows themselves, while they travel."""
    leaving_rd: Tensor = _Begin.apply(rows_rd, splits, under_way)  # type: ignore[assignment]
    return leaving_rd


def _awaited(leaving_rd: Tensor, splits: _Splits, under_way: _UnderWay) -> Tensor:
    arrived_sd: Tensor = _Await.apply(leaving_rd, splits, under_way)  # type: ignore[assignment]
    return arrived_sd


class _Begin(torch.autograd.Function):
    """See Note [begun and awaited]."""

    @staticmethod
    def forward(ctx: Any, rows_rd: Tensor, splits: _Splits, under_way: _UnderWay) -> Tensor:
        ctx.under_way = under_way
        under_way.begin(rows_rd, splits)
        return rows_rd.view_as(rows_rd)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.under_way.wait(), None, None


class _Await(torch.autograd.Function):
    """See Note [begun and awaited]."""

    @staticmethod
    def forward(ctx: Any, leaving_rd: Tensor, splits: _Splits, under_way: _UnderWay) -> Tensor:
        ctx.splits, ctx.under_way = splits, under_way
        return under_way.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.under_way.begin(grads[0], ctx.splits.back()), None, None
