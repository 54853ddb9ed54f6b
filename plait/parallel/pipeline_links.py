"""Sends and receives between the ranks of a pipeline, of tensors whose sizes both sides know.

Note [one order]: all ranks issue their transfers in one order (partition/pipeline_schedule.py), in which no transfer
needs a later one. So the first transfer that is still under way can always end, however few the backend lets pass at a
time: NCCL has no tags and may carry a rank's transfers strictly one after the other.

Note [receives first]: gloo matches transfers by tag, so that a receive may be posted long before its turn. It must be:
a gloo rank sends only when the other has said that it has room, and that word queues behind all messages in that
direction. Posted late, each message over a slow link waits for one in the other direction as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from plait.parallel.watched import WATCH
from plait.partition.pipeline_schedule import Action, receiving_stage

SENDS_KEPT = 4
"""Results under way to other ranks; a further send waits for the oldest, so that their memory stays bounded."""
RECEIVES_AHEAD = 4
"""Receives that a rank posts before it needs their results."""

WaitFor = Callable[[dist.Work], object]
"""Blocks until a transfer is over (on a GPU: its stream does)."""


def wait_for(work: dist.Work) -> None:
    """Wait until a transfer is over, without timing the wait."""
    work.wait()


class StageLinks:
    """One rank's transfers of one step; `finish` ends it. Every rank of the group must run the same order through."""

    def __init__(
        self,
        order: Sequence[Action],
        *,
        stages: int,
        group: dist.ProcessGroup,
        room_for: Callable[[int], Tensor],
        wait: WaitFor = wait_for,
    ) -> None:
        self._group, self._room_for, self._wait = group, room_for, wait
        self._rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._peers: dict[Action, int] = {}
        self._tags: dict[Action, int] = {}
        self._ahead: deque[Action] = deque()
        self._by_tag = dist.get_backend(group) == "gloo"
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        self._receives: dict[Action, tuple[dist.Work, Tensor]] = {}
        for tag, action in enumerate(order):
            towards = receiving_stage(action, stages)
            assert towards is not None, f"no rank waits for {action}"
            source, target = action.stage % ranks, towards % ranks
            if self._rank in (source, target):
                self._tags[action] = tag
                self._peers[action] = target if source == self._rank else source
        self._mine = {action for action in self._tags if action.stage % ranks == self._rank}
        # See Note [receives first]: there, sends need no place in the order.
        self._ahead.extend(action for action in self._tags if not (self._by_tag and action in self._mine))
        self._look_ahead()

    def send(self, action: Action, result: Tensor) -> None:
        """Begin to send an action's result, which must not change until it has arrived."""
        if not self._by_tag:
            while self._ahead[0] != action:
                self._make_room()
            self._ahead.popleft()
        result = result.detach().contiguous()
        work = dist.isend(result, group=self._group, group_dst=self._peers[action], tag=self._tags[action])
        assert work is not None
        self._sends.append((work, result))
        if len(self._sends) > SENDS_KEPT:
            with WATCH.wait("stage message"):
                self._wait(self._sends.popleft()[0])

    def receive(self, action: Action) -> Tensor:
        """The result of another rank's action; blocks until it is here (on a GPU: its stream does)."""
        while action not in self._receives:
            self._make_room()
        work, result = self._receives.pop(action)
        self._look_ahead()
        with WATCH.wait("stage message"):
            self._wait(work)
        return result

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        assert not self._ahead and not self._receives, "a transfer of the schedule was never asked for"
        while self._sends:
            with WATCH.wait("stage message"):
                self._wait(self._sends.popleft()[0])

    def _look_ahead(self) -> None:
        while self._ahead and self._ahead[0] not in self._mine and len(self._receives) < RECEIVES_AHEAD:
            self._make_room()

    def _make_room(self) -> None:
        """Post the next receive of the order."""
        action = self._ahead.popleft()
        assert action not in self._mine, f"{action} must be sent before what comes later is received"
        result = self._room_for(action.micro)
        work = dist.irecv(result, group=self._group, group_src=self._peers[action], tag=self._tags[action])
        assert work is not None
        self._receives[action] = work, result
