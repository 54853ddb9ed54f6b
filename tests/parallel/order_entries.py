"""What ranks do whose transfers, waits and backward passes are noted in the order in which they happen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from plait.launch.values.job import RankContext
from plait.parallel import reduction
from plait.parallel.fully_sharded import NO_BUCKET_LIMIT
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.mesh import make_groups, open_store
from plait.parallel.reduction import NoStream, TransferStream
from plait.trainer.state import TrainState
from plait.trainer.worker import process_group_for
from tests.parallel.reduce_entries import Branches, shared
from tests.parallel.shard_entries import assembled, plan_of

BEGINNERS = ("isend", "irecv", "all_reduce")


class Diary:
    """Notes what happens, each with whether it happened beside the arithmetic."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, bool]] = []
        self.beside = False

    def note(self, what: str) -> None:
        self.lines.append((what, self.beside))


class NotedSideStream:
    """A stream as a GPU's: waits in its blocks keep nobody waiting, so they are always allowed."""

    def __init__(self, diary: Diary) -> None:
        self._diary = diary

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        self._diary.beside = True
        try:
            yield
        finally:
            self._diary.beside = False

    def arrived(self) -> None:
        """In this diary there is one stream that computes."""

    def holds_up(self, works: Sequence[dist.Work]) -> bool:
        return False

    def join(self) -> None:
        self._diary.note("join")


class NotedWork(dist.Work):
    """A transfer, whose waits are noted with whether it was over already."""

    def __init__(self, work: dist.Work, diary: Diary) -> None:
        super().__init__()
        self._work, self._diary = work, diary

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: timedelta = NO_BUCKET_LIMIT) -> bool:
        self._diary.note("wait for what is over" if self._work.is_completed() else "wait")
        return self._work.wait(timeout)


@contextmanager
def noted_transfers(diary: Diary) -> Iterator[None]:
    """Note every transfer that begins in the block, and every wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in BEGINNERS:
            patch.setattr(dist, name, partial(_begin, diary, name, getattr(dist, name)))
        scatter = reduction.reduce_scatter
        patch.setattr(reduction, "reduce_scatter", partial(_begin, diary, "reduce_scatter", scatter))
        yield


def _begin(diary: Diary, name: str, begin: Callable[..., Any], *tensors: Any, **more: Any) -> Any:
    diary.note(name)
    work = begin(*tensors, **more)
    return NotedWork(work, diary) if isinstance(work, dist.Work) else work


def sum_split_buckets(context: RankContext, argument: str) -> None:
    """Two sums for each bucket, over neighbours and over those with the same part, during one backward pass."""
    asked = json.loads(argument)
    dist.init_process_group(
        "gloo", store=open_store(context.rendezvous, context.rank, 4), rank=context.rank, world_size=4
    )
    groups = make_groups([(0, 1), (2, 3), (0, 2), (1, 3)])
    first = context.rank - context.rank % 2
    model, diary = Branches(), Diary()
    stream: TransferStream = NotedSideStream(diary) if asked["stream"] == "side" else NoStream()
    reducer = GradientReducer(
        shared(model, (context.rank % 2, context.rank % 2 + 2)), groups, groups[first, first + 1], 64,
        asked["transfer"], stream,
    )  # fmt: skip
    reducer.split_units()
    model.register_full_backward_pre_hook(lambda *_: diary.note("backward begins"))
    with noted_transfers(diary):
        reducer.open()
        reducer.arm(0)
        model(1.0, "abcde").backward()
        diary.note("backward ends")
        reducer.close()
    sums = {name: p.detach().sum().item() for name, p in model.named_parameters()}
    context.send("noted", lines=diary.lines, sums=sums)
    dist.destroy_process_group()


def sum_copies_of_rows(context: RankContext, argument: str) -> None:
    """A step with split parameters: when each layer's backward begins, and when sums over those with the same rows."""
    case = json.loads(argument)
    diary = Diary()
    with process_group_for(context, plan_of(case)), assembled(case) as assembly:
        for layer in assembly.model.chunks[0].layers.values():
            layer.register_full_backward_pre_hook(lambda *_: diary.note("layer"))
        with noted_transfers(diary):
            assembly.step(TrainState())
    Path(case["folder"], f"{case['name']}-{context.rank}.json").write_text(json.dumps(diary.lines))
