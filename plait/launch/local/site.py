"""The part of a job that runs on one host, as the supervisor sees it: events from it, orders to it."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from plait.errors import RunFailed, StopSignal
from plait.launch.local.channel import LineReader
from plait.launch.local.server import ServerProcess
from plait.launch.values.job import Job
from plait.launch.values.progress import RankProgress
from plait.launch.watching.board import ProgressBoard, process_state
from plait.launch.watching.traffic import Traffic, traffic_of

# Note [events]: an event is what a rank or its fork server said, as it was said, for a rank with its number as
# "rank". Two more are ours: {"rank", "ended"}: its wire is closed, so its death must be reported soon; and {"over"}: no
# rank of this host is left and nothing will follow, with the "reason" where the host did not say it itself.
# A host other than ours can also ask for a {"stop": signal}.
RankEvent = Mapping[str, Any]
KillOrder = Literal["SIGTERM", "SIGKILL", "pause"]
"""pause: SIGTERM because the hosts of the run change, after which it goes on."""
_SILENCE_S = 1.0
_TRAFFIC_EVERY_LOOKS = 4
"""How often the traffic of ranks that get on is read, so that it is known how fast it was before it became slow."""


class WorkerHost(Protocol):
    """One host's part of a job; a selector can wait for it to have events."""

    @property
    def job(self) -> Job:
        """The host's part of the job."""
        ...

    @property
    def host(self) -> str | None:
        """The host's name for sentences; None for this machine."""
        ...

    @property
    def address(self) -> str:
        """The address at which other hosts reach it; empty for this machine."""
        ...

    def fileno(self) -> int: ...

    def read(self) -> list[RankEvent]:
        """Events since the last call, in order; empty if there were none."""
        ...

    def signal(self, order: KillOrder, why: str = "") -> None:
        """Send a signal to every rank that is left; `why` is for the people on another host."""
        ...

    def kill(self) -> None:
        """End the process that starts the ranks, and through the kernel the ranks: the way out when it is stuck."""
        ...

    def observe(self) -> Sequence[RankProgress]:
        """How far each of its ranks is."""
        ...

    def stack_of(self, rank: int) -> str:
        """The Python stacks of a rank that is killed next; empty where they cannot be had. May take a second."""
        ...

    def is_server_stopped(self) -> bool:
        """Whether the process that starts the ranks was stopped by a signal."""
        ...


class MembershipEvents(Protocol):
    """Hosts that join a run, and leave it, while its ranks work; a selector can wait for them."""

    def fileno(self) -> int: ...

    def look(self) -> None:
        """Take in what hosts have sent; never blocks."""
        ...

    @property
    def wants_pause(self) -> bool:
        """Whether the ranks are to save and return, so that hosts can come and go."""
        ...

    def lets_go(self, site: WorkerHost, by: StopSignal) -> bool:
        """A host was stopped where it is: whether the run goes on without it, and so is paused."""
        ...


class LocalWorkerHost:
    """This machine's part: a fork server that has been sent the job, and a wire to each of its ranks."""

    def __init__(self, job: Job, server: ServerProcess, wires: Sequence[socket.socket], board: ProgressBoard) -> None:
        self.job = job
        self._board = board
        self._pids: dict[int, int] = {}
        self.host, self.address = None, ""
        self._looks = 0
        self._server = server
        self._readers = {
            rank: LineReader(wire, sender=f"rank {rank}") for rank, wire in enumerate(wires, start=job.first_rank)
        }
        self._selector = selectors.EpollSelector()
        self._selector.register(server.answers.wire, selectors.EVENT_READ)
        for rank, reader in self._readers.items():
            self._selector.register(reader.wire, selectors.EVENT_READ, rank)

    def fileno(self) -> int:
        return self._selector.fileno()

    def close(self) -> None:
        """Close the wires to the ranks; ends no process."""
        self._selector.close()

    def read(self) -> list[RankEvent]:
        """As in WorkerHost; at the end it waits a moment for what the ranks left in their wires."""
        events: list[RankEvent] = []
        for key, _ in self._selector.select(0):
            events += self._read_server() if key.data is None else self._read_rank(key.data)
        return events

    def signal(self, order: KillOrder, why: str = "") -> None:
        self._server.request({"signal": "SIGTERM" if order == "pause" else order})

    def kill(self) -> None:
        self._server.kill()

    def observe(self) -> Sequence[RankProgress]:
        first, self._looks = self.job.first_rank, self._looks + 1
        seen = [self._board.read(rank - first, rank=rank, pid=pid) for rank, pid in self._pids.items()]
        reads_all = self._looks % _TRAFFIC_EVERY_LOOKS == 0
        traffic = traffic_of([self._pids[one.rank] for one in seen if reads_all or one.cpu_s is not None])
        return [_with_traffic(one, traffic.get(self._pids[one.rank])) for one in seen]

    def stack_of(self, rank: int) -> str:
        pid = self._pids.get(rank)
        return "" if pid is None else self._board.stack_of(pid)

    def is_server_stopped(self) -> bool:
        return process_state(self._server.pid)[0] == "stopped"

    def _read_rank(self, rank: int) -> Iterator[RankEvent]:
        if rank not in self._readers:  # its end was reported a moment ago
            return
        try:
            yield from self._events_from(rank, self._readers[rank].read())
        except RunFailed:  # garbled: nothing more can be understood
            self._forget(rank)
            raise
        if self._readers[rank].ended:
            self._forget(rank)
            yield {"rank": rank, "ended": True}

    def _read_server(self) -> Iterator[RankEvent]:
        answers = self._server.answers
        for value in answers.read():
            if "died" in value:
                self._pids.pop(value["died"], None)
            if "died" in value and value["died"] in self._readers:  # its last messages come before its end
                yield from self._events_from(value["died"], self._readers[value["died"]].read_all())
                self._forget(value["died"])
            if "over" in value:
                yield from self._remaining_events()
            yield value
        if answers.ended:
            self._selector.unregister(answers.wire)
            yield from self._remaining_events()
            yield {"over": True, "reason": self._server.exit_description()}

    def _remaining_events(self) -> Iterator[RankEvent]:
        """Take what the ranks left in their wires, until each is closed: then its rank is gone."""
        deadline = time.monotonic() + _SILENCE_S
        for rank, reader in self._readers.items():
            while not reader.ended and reader.wait(deadline - time.monotonic()):
                yield from self._events_from(rank, reader.read())

    def _events_from(self, rank: int, values: Sequence[Mapping[str, Any]]) -> Iterator[RankEvent]:
        for value in values:
            if "started" in value:
                self._pids[rank] = value["started"]
            yield {"rank": rank, **value}

    def _forget(self, rank: int) -> None:
        self._selector.unregister(self._readers.pop(rank).wire)


def _with_traffic(rank: RankProgress, traffic: Traffic | None) -> RankProgress:
    return rank if traffic is None else replace(rank, network_bytes=traffic.nbytes, sends_to=traffic.sends_to)
