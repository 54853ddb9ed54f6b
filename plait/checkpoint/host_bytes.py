"""The bytes of tensors in the host's memory, wherever the tensors are: one tensor piece by piece, or copies of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from plait.accelerator import has_streams, module_of

PIECE_BYTES = 32 * 2**20
"""Large enough that a copy from a device runs at the bus's speed; two such pieces are in memory at a time."""

BeginCopy = Callable[[Tensor, Tensor], Callable[[], None]]
"""Begins to copy the second tensor's bytes into the first; what it returns waits until they are there."""


def host_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in order; a piece is valid until the next one is asked for.

    What lies on a processor is one piece and not copied, and so is what has no bytes; from a device without streams all
    comes at once. From others pieces come through two buffers of pinned memory, which the bus writes to directly: one
    is filled while the caller works with the other.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not has_streams(flat.device) or not len(flat):
        return iter([flat.cpu().numpy().data])
    size = min(PIECE_BYTES, len(flat))
    rooms = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    return pieces_through(rooms, flat, _begin_copy)


def pieces_through(rooms: list[Tensor], flat: Tensor, begin: BeginCopy) -> Iterator[memoryview]:
    """The bytes of `flat` in pieces of the rooms' size, in turn through each of two; the next is on its way while one
    is worked with."""
    starts = range(0, len(flat), len(rooms[0]))
    parts = [flat[start : start + len(rooms[0])] for start in starts]

    def into(number: int) -> Tensor:
        return rooms[number % 2][: len(parts[number])]

    there = begin(into(0), parts[0]) if parts else None
    for number in range(len(parts)):
        assert there is not None
        there()
        there = begin(into(number + 1), parts[number + 1]) if number + 1 < len(parts) else None
        yield into(number).numpy().data


# Note [copies in the stream's order]: a copy to pinned memory is one more operation of the stream that computes. It
# reads what that stream wrote before, and all that the stream is given later, such as the update that changes a weight,
# comes after it. So the host may go on at once; only who reads the copy has to wait.


class HostCopies:
    """Copies of tensors in the host's memory. The host waits for none that comes from a device with streams: see Note
    [copies in the stream's order].

    Their pinned memory is kept for the next copies, because pinning takes longer than copying. So one set of copies
    must no longer be read when the next one begins. Where memory cannot be pinned, copies block. Tests stand in for a
    device by `has_streams` and `begin`.
    """

    def __init__(
        self, has_streams: Callable[[torch.device], bool] = has_streams, begin: BeginCopy | None = None
    ) -> None:
        self._has_streams, self._begin = has_streams, begin or _begin_copy
        self._rooms: dict[int, Tensor] = {}

    def new_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Bytes that copies of these tensors take beside the memory that is kept from earlier ones."""
        return sum(
            _pinned_bytes(tensor.nbytes) if self._has_streams(tensor.device) else tensor.nbytes
            for number, tensor in enumerate(tensors)
            if not self._has_room(number, tensor)
        )

    def begin(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Begin to copy: the copies, and a function that blocks until they are complete, which any thread may call."""
        copies, waits = list[Tensor](), list[Callable[[], None]]()
        for number, tensor in enumerate(tensors):
            room = self._room(number, tensor) if self._has_streams(tensor.device) else None
            if room is None:
                copies.append(tensor.detach().to("cpu", copy=True))
            else:
                copies.append(room)
                waits.append(self._begin(room, tensor.detach()))

        def wait() -> None:
            for one in waits:
                one()

        return copies, wait

    def _room(self, number: int, tensor: Tensor) -> Tensor | None:
        if not self._has_room(number, tensor):
            self._rooms.pop(number, None)
            try:
                self._rooms[number] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not tensor.is_cpu)
            except RuntimeError:  # a limit on locked memory
                return None
        return self._rooms[number]

    def _has_room(self, number: int, tensor: Tensor) -> bool:
        room = self._rooms.get(number)
        return room is not None and (room.shape, room.dtype) == (tensor.shape, tensor.dtype)


def _pinned_bytes(nbytes: int) -> int:
    """torch pins memory in blocks whose sizes are powers of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _begin_copy(room: Tensor, part: Tensor) -> Callable[[], None]:
    room.copy_(part, non_blocking=True)
    copied = module_of(part.device).Event()
    copied.record(module_of(part.device).current_stream(part.device))
    return copied.synchronize
