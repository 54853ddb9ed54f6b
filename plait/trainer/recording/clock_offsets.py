"""Measures how far the ranks' clocks are apart by round trips, after Cristian (1989).

Processes of one machine read one monotonic clock. For another machine rank 0 sends a message and the other answers with
the time of its clock. That was read between the sending and the return, so the middle of the two is off by at most half
of the round trip. The fastest of several rounds counts. On a wired network that is some 0.1 ms; clocks drift apart by
some 0.01 ms in a second, so offsets are measured right after the steps.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from plait.parallel.communicator import Communicator
from plait.parallel.exchange import gather_json
from plait.parallel.mesh import GroupCommunicator

PINGS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """A rank's clock minus rank 0's, and the largest error of that."""

    offset_s: float = 0.0
    error_s: float = 0.0


def clock_offsets(
    world: Communicator, clock: Callable[[], float] = time.perf_counter, clock_name: Callable[[], str] | None = None
) -> list[ClockOffset]:
    """The offset of every rank, on all ranks; ranks on one clock share it. Every rank must call it; blocks."""
    machines = gather_json((clock_name or _clock_name)(), world)
    own = ClockOffset()
    for rank, machine in enumerate(machines):
        if machine != machines[0] and world.index in (0, rank):
            assert isinstance(world, GroupCommunicator)
            found = _ask(world, rank, clock) if world.index == 0 else _answer(world, clock)
            own = found if world.index == rank else own
    gathered = gather_json([own.offset_s, own.error_s], world)
    return [ClockOffset(offset_s=offset_s, error_s=error_s) for offset_s, error_s in gathered]


def offset_of(sent_s: float, read_s: float, returned_s: float) -> ClockOffset:
    """The offset of a clock that read `read_s` between two moments of another clock."""
    return ClockOffset(offset_s=read_s - (sent_s + returned_s) / 2, error_s=(returned_s - sent_s) / 2)


def _ask(world: GroupCommunicator, rank: int, clock: Callable[[], float]) -> ClockOffset:
    """Rank 0's side; it then sends the result to the other rank."""
    rounds, message = list[ClockOffset](), torch.zeros(2, dtype=torch.float64)
    for _ in range(PINGS):
        sent_s = clock()
        dist.send(message, group=world.group, group_dst=rank)
        dist.recv(message, group=world.group, group_src=rank)
        rounds.append(offset_of(sent_s, float(message[0]), clock()))
    best = min(rounds, key=lambda one: one.error_s)
    dist.send(torch.tensor([best.offset_s, best.error_s], dtype=torch.float64), group=world.group, group_dst=rank)
    return best


def _answer(world: GroupCommunicator, clock: Callable[[], float]) -> ClockOffset:
    message = torch.zeros(2, dtype=torch.float64)
    for _ in range(PINGS):
        dist.recv(message, group=world.group, group_src=0)
        message[0] = clock()
        dist.send(message, group=world.group, group_dst=0)
    dist.recv(message, group=world.group, group_src=0)
    return ClockOffset(offset_s=float(message[0]), error_s=float(message[1]))


def _clock_name() -> str:
    """Identifies the monotonic clock of this process: the machine's since its start, or a container's own."""
    parts = [platform.node()]
    with suppress(OSError):
        parts = [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            str(Path("/proc/self/ns/time").readlink()),
        ]
    return " ".join(parts)
