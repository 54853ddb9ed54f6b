"""The two ends of a pipeline whose head is the embedding: each has a copy of that weight, and its gradients meet.

Note [before the end]: the embedding's gradient is the very last of a step, so that nothing would hide a sum of it, and
over a slow cable that costs more than a micro-batch. But the head's gradient is done sooner, and so are all rows of the
embedding's that the last micro-batch does not touch. Both travel under the last backward; what is left at the end are
the rows of one micro-batch's tokens. Each end then adds the same two numbers: bit for bit the sum of all at once.
"""

from __future__ import annotations

from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor

from plait.parallel.buckets import Shared
from plait.parallel.travel import Works, wait_for
from plait.parallel.woven import Gradients
from plait.plan.plan import Plan
from plait.plan.schedule import announces_last

TIED = "embed.tokens.weight"
HEAD, EARLY, COUNT, PLACES, ROWS = range(2**21, 2**21 + 5)
"""Tags of the messages: the head's gradient; the embedding's before the last backward; and what that changed."""


def meets_apart(weight: Shared, plan: Plan) -> bool:
    """Whether a weight is the tied one, on two processors alone.

    A GPU's roads are wide, and where there are more copies one sum for all of them is simpler.
    """
    layout = plan.layout
    at_both_ends = weight.name == TIED and plan.shape.tied and layout.pipeline > 1
    alone = layout.batch_parts * layout.context == 1
    return at_both_ends and alone and plan.device == "cpu" and plan.gradient_transfer == "float32"


def goes_ahead(plan: Plan) -> bool:
    """Whether anything can travel before the end."""
    return announces_last(plan.layout.schedule, ceil(max(plan.parts) / plan.micro_sequences))


class Ends:
    """The gradients of a rank at one end: those that `inner` cares for, and the tied weight's, which is none of them.

    Both ranks of the group must make one, `ahead` or not, and call the same methods; one `embeds`, the other has the
    head.
    """

    def __init__(
        self, inner: Gradients, weight: Shared, group: dist.ProcessGroup, *, embeds: bool, ahead: bool
    ) -> None:
        self._inner, self._group, self._chunk, self._embeds = inner, group, weight.chunk, embeds
        self._parameter, self._peer, self._ahead = weight.parameter, 1 - dist.get_rank(group), ahead
        self._theirs = torch.zeros_like(weight.parameter)
        self._before = torch.zeros_like(weight.parameter) if embeds and ahead else None
        self._armed = False
        self._sends: Works = []
        self._receives: Works = []
        if not embeds and ahead:
            weight.parameter.register_post_accumulate_grad_hook(lambda _: self._head_is_done())

    @property
    def buckets(self) -> list[Tensor]:
        """What `inner` keeps, and the room for the other end's numbers."""
        own = [self._theirs, *([] if self._before is None else [self._before])]
        return [*self._inner.buckets, *own]

    def open(self) -> None:
        """Begin a step, and make room for what the other end sends while this one computes."""
        self._inner.open()
        self._parameter.grad = None
        self._armed = False
        self._receives.append(self._receive(self._theirs, HEAD if self._embeds else EARLY))

    def arm(self, chunk: int) -> None:
        """The next backward through this chunk is its last: what it does not touch may go."""
        self._inner.arm(chunk)
        if chunk != self._chunk:
            return
        self._armed = True
        if self._before is not None:
            self._before.copy_(self._own())
            self._sends.append(self._send(self._before, EARLY))

    def close(self) -> None:
        """Block until the tied weight's gradient is the sum of both ends', too."""
        self._inner.close()
        own = self._own()
        if self._embeds:
            self._send_rest(own)
        elif not self._sends:
            self._sends.append(self._send(own, HEAD))
        wait_for(self._receives)
        if not self._embeds and self._ahead:
            self._receive_rest()
        wait_for(self._sends)
        own.add_(self._theirs)

    def publish(self) -> None:
        self._inner.publish()

    def settle(self) -> None:
        self._inner.settle()

    def _own(self) -> Tensor:
        """This end's gradient so far."""
        if self._parameter.grad is None:
            self._parameter.grad = torch.zeros_like(self._parameter)
        return self._parameter.grad

    def _head_is_done(self) -> None:
        if self._armed:
            self._sends.append(self._send(self._own(), HEAD))

    def _send_rest(self, own: Tensor) -> None:
        """What the last backward changed, or all of it where nothing went before."""
        if self._before is None:
            self._sends.append(self._send(own, EARLY))
            return
        places = (own != self._before).any(dim=1).nonzero().flatten()
        self._sends.append(self._send(torch.tensor([len(places)]), COUNT))
        if len(places):
            self._sends += [self._send(places, PLACES), self._send(own[places], ROWS)]

    def _receive_rest(self) -> None:
        count = torch.zeros(1, dtype=torch.int64)
        self._receive(count, COUNT).wait()
        if not count:
            return
        places = torch.zeros(int(count), dtype=torch.int64)
        rows = self._theirs.new_zeros(len(places), self._theirs.shape[1])
        wait_for([self._receive(places, PLACES), self._receive(rows, ROWS)])
        self._theirs[places] = rows

    def _send(self, values: Tensor, tag: int) -> dist.Work:
        work = dist.isend(values, group=self._group, group_dst=self._peer, tag=tag)
        assert work is not None
        return work

    def _receive(self, room: Tensor, tag: int) -> dist.Work:
        work = dist.irecv(room, group=self._group, group_src=self._peer, tag=tag)
        assert work is not None
        return work
