"""The bytes of a tensor in the host's memory, piece by piece, wherever the tensor is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


def _begin_copy(room: Tensor, part: Tensor) -> Callable[[], None]:
    room.copy_(part, non_blocking=True)
    copied = module_of(part.device).Event()
    copied.record(module_of(part.device).current_stream(part.device))
    return copied.synchronize
