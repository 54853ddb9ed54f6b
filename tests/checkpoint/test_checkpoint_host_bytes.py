"""Bytes come to the host in order, whatever their number, and a copy is never read before it has ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from plait.checkpoint.host_bytes import HostCopies, host_bytes, pieces_through


class LateCopies:
    """A device whose copies arrive only once somebody waits for them; notes what happens."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.begun = 0

    def begin(self, room: Tensor, part: Tensor) -> Callable[[], None]:
        number, self.begun = self.begun, self.begun + 1
        self.order.append(f"begin {number}")

        def wait() -> None:
            self.order.append(f"wait {number}")
            room.copy_(part)

        return wait


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 20])
def test_pieces_are_the_bytes_in_order(size: int) -> None:
    flat, device = torch.arange(size, dtype=torch.uint8), LateCopies()
    found = bytearray()
    for piece in pieces_through([torch.zeros(8, dtype=torch.uint8) for _ in range(2)], flat, device.begin):
        device.order.append("use")
        found += piece
    assert bytes(found) == bytes(range(size))
    if size == 20:  # a piece is used while the next one is on its way
        assert device.order == [
            "begin 0", "wait 0", "begin 1", "use", "wait 1", "begin 2", "use", "wait 2", "use",
        ]  # fmt: skip


@pytest.mark.parametrize("tensor", [torch.arange(6.0).view(2, 3).T, torch.zeros(0), torch.tensor(3, dtype=torch.int64)])
def test_a_processor_s_bytes_are_one_piece(tensor: Tensor) -> None:
    (piece,) = host_bytes(tensor)
    assert bytes(piece) == tensor.contiguous().numpy().tobytes()


def test_copies_of_a_device_with_streams_are_waited_for_and_their_memory_is_used_again() -> None:
    device = LateCopies()
    copies = HostCopies(has_streams=lambda _: True, begin=device.begin)
    tensors = [torch.arange(6.0).view(2, 3).T, torch.arange(5)]
    assert copies.new_bytes(tensors) == 32 + 64, "pinned memory comes in powers of two"
    found, wait = copies.begin(tensors)
    assert device.order == ["begin 0", "begin 1"], "the host waits for nothing"
    wait()
    assert all(map(torch.equal, found, tensors))
    others = [one + 1 for one in tensors]
    assert copies.new_bytes(others) == 0
    again, wait = copies.begin(others)
    wait()
    assert all(map(torch.equal, again, others))
    assert [one.data_ptr() for one in again] == [one.data_ptr() for one in found]
    assert copies.new_bytes([others[0][:1], others[1]]) == 8, "of another shape"


def test_copies_of_a_processor_s_tensors_are_complete_at_once_and_their_own() -> None:
    tensor, copies = torch.arange(4.0), HostCopies()
    assert copies.new_bytes([tensor]) == 16
    (first,), _ = copies.begin([tensor])
    tensor += 1
    (second,), _ = copies.begin([tensor])
    assert first.tolist() == [0, 1, 2, 3] and second.tolist() == [1, 2, 3, 4]
