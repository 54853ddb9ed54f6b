"""Host 0 of a run on several hosts: admits the others, and runs jobs on all of them as if they were one machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from plait.checked_json import one_line
from plait.errors import Interrupted, PlaitError, RunFailed
from plait.launch.local.run import ForkServer, Rendezvous
from plait.launch.local.signals import collected_signals
from plait.launch.local.site import WorkerHost
from plait.launch.local.supervise import Supervision
from plait.launch.remote.host_numbering import HostIdentity, by_address, host_numbers
from plait.launch.remote.interface import interface_of
from plait.launch.remote.link import DEFAULT_PULSE, HostConnection, Pulse
from plait.launch.remote.listener import FULL_SENTENCE, Arrival, JoinListener, joined_text, listener_at, refuse_host
from plait.launch.remote.remote_site import RemoteWorkerHost
from plait.launch.remote.secret import Secret
from plait.launch.remote.wire import Frame
from plait.launch.values.entries import EntryTable
from plait.launch.values.failure import RESUME_ADVICE
from plait.launch.values.job import HostRanks, Job, JobResult, Message, StoppedBy
from plait.launch.values.phase import Bounds

_LOOK_S = 0.2
_GIVEN_UP_SENTENCE = "host 0 gave up the run before all hosts were in; see what it printed"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPart:
    """What one host does in a job; these replace the job's own. A host with 0 ranks sits the job out."""

    ranks: int
    threads: int
    argument: str
    log_dir: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An admitted host, numbered from 1; `host_info` is what it sent about itself, with its "name" if it has one."""

    host: int
    name: str
    address: str
    host_info: Mapping[str, Any]
    link: HostConnection = field(repr=False)

    def __str__(self) -> str:
        return self.name if self.name == self.address else f"{self.name} ({self.address})"

    def ask(self, kind: str, values: Mapping[str, Any], blob: bytes = b"") -> Frame:
        """What the host's handler of this kind replies; from any thread, at any time, also while a job runs.

        Blocks for as long as the host lives. Raises RunFailed when it is lost, and the handler's PlaitError.
        """
        return self.link.ask(kind, values, blob, host=str(self))


class Hosts:
    """Host 0 and the hosts that join it; the thread that enters the block must outlive it, see ForkServer.

    Leaving the block sends the others the end of the run, or the sentence of the error that ended it.
    """

    def __init__(
        self,
        *,
        address: str,
        secret: Secret,
        members: int,
        entries: EntryTable,
        port: int = 0,
        pulse: Pulse = DEFAULT_PULSE,
        working_folder: Path | None = None,
    ) -> None:
        self.members: tuple[Member, ...] = ()
        self._arrived: tuple[Member, ...] = ()
        self._address = address
        self._interface = interface_of(address)
        self._port, self._secret = port, secret
        self._wanted, self._pulse = members, pulse
        self.server = ForkServer(entries, working_folder=working_folder)
        self._gate: JoinListener | None = None
        self._admitted: list[Arrival] = []
        self._jobs = 0
        self._stopped_by: StoppedBy = "finished"

    def __enter__(self) -> Hosts:
        self._gate = JoinListener(address=self._address, port=self._port, secret=self._secret, pulse=self._pulse)
        self.server.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._opened().close(_GIVEN_UP_SENTENCE)
        failed = None if isinstance(error, Interrupted) else error
        if isinstance(error, Interrupted):
            self._stopped_by = error.signal
        last = {"stopped_by": self._stopped_by} if failed is None else {"failed": _as_sentence(failed)}
        for arrival in self._admitted:
            arrival.link.part("end", last)
        self.server.__exit__(kind, error, at)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which the hosts reach each other, this one first."""
        return self._address, *(member.address for member in self.members)

    @property
    def join_address(self) -> str:
        """HOST:PORT, for the others to type."""
        return joined_text(self._address, self._opened().port)

    def admit(
        self,
        check_host_info: Callable[[Mapping[str, Any]], str | None],
        within_s: float,
        order: Sequence[HostIdentity] = (),
        on_lost: Callable[[str], None] = lambda name: None,
        on_failed: Callable[[int], None] = lambda count: None,
    ) -> tuple[Member, ...]:
        """Wait until all hosts are in; then the port is closed, and the secret opens nothing any more.

        Hosts are numbered by their addresses, except that those in `order`, host 0 first, come before all others in
        that order: each known by its "mark", or else by its "name". `check_host_info` is called with each host's info
        in turn, here; a sentence from it is shown there and sends the host away. `on_lost` gets the name of a host that
        left; `on_failed`, each minute and when all are in, how many came in vain. Raises PlaitError when time is up.
        """
        gate, deadline = self._opened(), time.monotonic() + within_s
        while len(self._admitted) < self._wanted:
            if time.monotonic() > deadline:
                raise PlaitError(self._who_is_missing(within_s))
            arrival = gate.next(min(_LOOK_S, deadline - time.monotonic()))
            if arrival is not None and (sentence := check_host_info(arrival.host_info)):
                refuse_host(arrival.link, sentence)
            elif arrival is not None:
                self._admitted.append(arrival)
            self._drop_the_lost(on_lost)
            now_s = time.monotonic() if len(self._admitted) < self._wanted else float("inf")  # all in: said at once
            if failed := gate.failed_attempts.due(now_s):
                on_failed(failed)
        gate.shut(FULL_SENTENCE)
        came = sorted(self._admitted, key=lambda one: by_address(one.link.address))
        places = host_numbers([(one.host_info.get("mark", ""), _name_of(one)) for one in came], order)
        arrived = sorted(zip(places, came, strict=True), key=lambda pair: pair[0])
        self._arrived = self.members = tuple(_member(host, one) for host, (_, one) in enumerate(arrived, start=1))
        return self.members

    def renumber(self, order: Sequence[int]) -> None:
        """Make host n the one that was admitted as order[n]; host 0 stays, those not in `order` are sent home."""
        assert order[0] == 0 and len(set(order)) == len(order), order
        stay = [self._arrived[host - 1] for host in order[1:]]
        for left in [one.link for one in self.members if all(one.link is not other.link for other in stay)]:
            self._admitted = [arrival for arrival in self._admitted if arrival.link is not left]
            left.part("end", {"stopped_by": "not needed"})
        self.members = tuple(replace(member, host=host) for host, member in enumerate(stay, start=1))

    def run(
        self,
        job: Job,
        *,
        on_message: Callable[[Message], None],
        parts: Sequence[HostPart],
        grace_s: float = 120,
        start_s: float = 120,
    ) -> JobResult:
        """Start the job's ranks on all hosts and block until all have ended, as `ForkServer.run` does on one.

        `parts` holds one part per host, host 0 first; ranks are numbered host by host. A job whose ranks are all on one
        host has its rendezvous there, in a file; else rank 0 is on host 0, and the others reach it over the network. A
        lost host ends the job everywhere with RunFailed.
        """
        began_s = time.monotonic()
        jobs = _jobs_of_hosts(job, parts, hosts=1 + len(self.members))
        bounds = Bounds(start_s=start_s, grace_s=grace_s, host_s=self._pulse.lost_after_s + 1)
        with collected_signals() as signals, self._started(jobs) as sites:
            self._stopped_by = Supervision(sites, signals, on_message, bounds).run()
        return JobResult(stopped_by=self._stopped_by, wall_s=time.monotonic() - began_s)

    @contextlib.contextmanager
    def _started(self, jobs: Mapping[int, Job]) -> Iterator[list[WorkerHost]]:
        """A WorkerHost for each host that has ranks, host 0's first, so that a later error leaves no ranks behind."""
        self._jobs += 1
        members = [self.members[host - 1] for host in jobs if host > 0]
        for member in members:
            _require_alive(member)
        with ExitStack() as stack:
            meeting = self._meeting(stack) if len(jobs) > 1 else None
            sites: list[WorkerHost] = [stack.enter_context(self.server.start(jobs[0], meeting))] if 0 in jobs else []
            for member in members:
                site = RemoteWorkerHost(jobs[member.host], member.link, host=str(member), number=self._jobs)
                site.start(meeting.rendezvous if meeting else None)
                sites.append(site)
            yield sites

    def _meeting(self, stack: ExitStack) -> Rendezvous:
        """A port for the ranks' store on our address alone, held from before the first rank is started."""
        listener = stack.enter_context(listener_at(self._address, 0))
        place = joined_text(self._address, listener.getsockname()[1])
        return Rendezvous(rendezvous=f"tcp://{place}/job-{self._jobs}", interface=self._interface, listener=listener)

    def _drop_the_lost(self, on_lost: Callable[[str], None]) -> None:
        """Remove hosts that left while they waited, so that others can take their places."""
        for arrival in [one for one in self._admitted if one.link.lost is not None]:
            arrival.link.close()
            self._admitted.remove(arrival)
            on_lost(_name_of(arrival))

    def _who_is_missing(self, within_s: float) -> str:
        return (
            f"{len(self._admitted)} of {self._wanted} other hosts joined {self.join_address} within {within_s:g} s; "
            "start plait join on each, see that they reach this address, and run the same command again"
        )

    def _opened(self) -> JoinListener:
        if self._gate is None:
            raise RuntimeError("Hosts serve only within their with block")
        return self._gate


def _jobs_of_hosts(job: Job, parts: Sequence[HostPart], *, hosts: int) -> dict[int, Job]:
    """The part of the job for each host that has ranks, by the host's number."""
    if len(parts) != hosts or sum(part.ranks for part in parts) != job.world_size:
        raise ValueError(f"{parts} are no parts of {job.world_size} ranks on {hosts} hosts")
    jobs, first_rank = {}, 0
    for host, part in enumerate(parts):
        if part.ranks:
            own = HostRanks(first_rank=first_rank, ranks=part.ranks)
            jobs[host] = replace(job, threads=part.threads, argument=part.argument, log_dir=part.log_dir, part=own)
        first_rank += part.ranks
    if len(jobs) > 1 and 0 not in jobs:
        raise ValueError("rank 0 of a job over several hosts must be on host 0, where the others meet it")
    return jobs


def _member(host: int, arrival: Arrival) -> Member:
    host_info, link = arrival.host_info, arrival.link
    return Member(host=host, name=_name_of(arrival), address=link.address, host_info=host_info, link=link)


def _name_of(arrival: Arrival) -> str:
    return one_line(str(arrival.host_info.get("name", arrival.link.address)))


def _require_alive(member: Member) -> None:
    if member.link.lost is not None:
        raise RunFailed(f"{member} was lost: {member.link.lost}; {RESUME_ADVICE}")


def _as_sentence(error: BaseException) -> str:
    if isinstance(error, PlaitError | KeyboardInterrupt):
        return str(error) or "stopped by Ctrl-C there"
    return f"ended by {type(error).__name__} there; see what it printed"
