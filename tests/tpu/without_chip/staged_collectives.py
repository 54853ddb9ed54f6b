"""Collectives of tensors on a device, through the host's memory and gloo: in place of `tpu_dist` where no chip is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Waits = Sequence[Any]


class StagedWork(dist.Work):
    """Operations on copies of tensors, and the tensors into which the copies go when they are done."""

    def __init__(self, works: Waits, arriving: Sequence[tuple[Tensor, Tensor]], held: object) -> None:
        super().__init__()
        self._works, self._arriving, self._held, self._done = works, arriving, held, False
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self, timeout: Any = None) -> bool:
        if not self._done:
            for work in self._works:
                work.wait()
            with torch.no_grad():
                for home, copy in self._arriving:
                    home.copy_(copy)
            self._done = True
            self._future.set_result([home for home, _ in self._arriving])
        return True

    def is_completed(self) -> bool:
        return self._done or all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        return self._future


class StagedGroup(dist.ProcessGroup):
    """A backend for one group of ranks; every operation is gloo's on copies in the host's memory."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def getBackendName(self) -> str:
        return "tpu_dist"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        copies = [one.detach().cpu() for one in tensors]
        work = self._gloo.allreduce(copies, opts if opts is not None else dist.AllreduceOptions())
        return StagedWork([work], list(zip(tensors, copies, strict=True)), copies)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        copies = [one.detach().cpu() for one in tensors]
        return StagedWork([self._gloo.broadcast(copies, opts)], list(zip(tensors, copies, strict=True)), copies)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        sent = [one.detach().cpu() for one in inputs]
        rooms = [[torch.empty_like(one, device="cpu") for one in row] for row in outputs]
        work = self._gloo.allgather(rooms, sent)
        pairs = [pair for row, room in zip(outputs, rooms, strict=True) for pair in zip(row, room, strict=True)]
        return StagedWork([work], pairs, (sent, rooms))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        sent, room = input.detach().cpu().reshape(-1), torch.empty(output.shape, dtype=output.dtype)
        work = self._gloo.allgather([list(room.view(self.size(), -1))], [sent])
        return StagedWork([work], [(output, room)], (sent, room))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        whole = input.detach().cpu().contiguous()
        reduce = dist.AllreduceOptions()
        if opts is not None:
            reduce.reduceOp = opts.reduceOp
        work = self._gloo.allreduce([whole], reduce)
        own = whole.reshape(self.size(), -1)[self.rank()].view(output.shape)
        return StagedWork([work], [(output, own)], whole)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        ((output,), (parts,)) = outputs, inputs
        return self.reduce_scatter_single(output, torch.cat([one.reshape(-1) for one in parts]), opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        sent, room = input.detach().cpu().contiguous(), torch.empty(output.shape, dtype=output.dtype)
        work = self._gloo.alltoall_base(room, sent, output_sizes, input_sizes, opts or dist.AllToAllOptions())
        return StagedWork([work], [(output, room)], (sent, room))

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        copies = [one.detach().cpu().contiguous() for one in tensors]
        return StagedWork([self._gloo.send(copies, to, tag)], [], copies)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        rooms = [torch.empty(one.shape, dtype=one.dtype) for one in tensors]
        return StagedWork([self._gloo.recv(rooms, source, tag)], list(zip(tensors, rooms, strict=True)), rooms)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._gloo.barrier(opts if opts is not None else dist.BarrierOptions())


def create_process_group(store: dist.Store, rank: int, size: int, timeout: Any) -> StagedGroup:
    """What torch calls for the backend `tpu_dist`."""
    return StagedGroup(store, rank, size, timeout)
