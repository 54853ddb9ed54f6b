"""Host 0 of a run on several hosts: invites and admits the others, and runs jobs on all of them as if they were one
machine."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from plait.checked_json import one_line
from plait.errors import Interrupted, PlaitError
from plait.hosts.connection import DEFAULT_HEARTBEAT, Heartbeat
from plait.hosts.connectivity import ConnectivityListener, check_connectivity
from plait.hosts.handshake import Secret
from plait.hosts.joining import (
    HostInfo,
    HostsRequest,
    JoinListener,
    admitted_info,
    choose_address,
    choose_secret,
    failed_attempts_text,
    invitation_text,
    joined_text,
    listener_at,
    network_text,
    own_host_info,
)
from plait.hosts.membership import HostIdentity, JoinPolicy, Member, Membership
from plait.hosts.protocol import RunEnd
from plait.hosts.remote_ranks import RemoteWorkerHost
from plait.launch.local.guard import allow_open_files
from plait.launch.local.run import ForkServer, Rendezvous
from plait.launch.local.signals import collected_signals
from plait.launch.local.site import MembershipEvents, WorkerHost
from plait.launch.local.supervise import Supervision
from plait.launch.network import interface_of
from plait.launch.values.entries import EntryTable
from plait.launch.values.failure import lost_host
from plait.launch.values.job import HostRanks, Job, JobResult, Message, StoppedBy
from plait.launch.values.phase import PhaseTimeouts
from plait.screen.screen import Log
from plait.units import counted
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

JOIN_TIMEOUT_S = 3600.0
_START_S = _GRACE_S = 120.0
_FILES_OF_A_MEMBER = 4  # the connection, both ends of its link's bell, and one to spare


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPart:
    """What one host does in a job; these replace the job's own. A host with 0 ranks sits the job out."""

    ranks: int
    threads: int
    argument: str
    log_dir: str | None = None


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
        heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
        working_folder: Path | None = None,
    ) -> None:
        self._address = address
        self._interface = interface_of(address)
        self._port, self._secret = port, secret
        self._wanted, self._heartbeat = members, heartbeat
        starts = "at once" if entries.preload else "with a job"
        self.server = ForkServer(entries, working_folder=working_folder, starts=starts)
        self._listener: JoinListener | None = None
        self._membership: Membership | None = None
        self._numbers = itertools.count(1)
        """Of the jobs, also of those that other threads run."""
        self._stopped_by: StoppedBy = "finished"

    def __enter__(self) -> Hosts:
        allow_open_files(_FILES_OF_A_MEMBER * self._wanted, f"a run of {1 + self._wanted} hosts")
        self._listener = JoinListener(
            address=self._address,
            port=self._port,
            secret=self._secret,
            heartbeat=self._heartbeat,
            expected=self._wanted,
        )
        self._membership = Membership(self._listener, self._wanted)
        self.server.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        failed = None if isinstance(error, Interrupted) else error
        if isinstance(error, Interrupted):
            self._stopped_by = error.signal
        last = RunEnd(stopped_by=self._stopped_by) if failed is None else RunEnd(failed=_as_sentence(failed))
        self.membership.close(last)
        self.server.__exit__(kind, error, at)

    @property
    def membership(self) -> Membership:
        """Who takes part: it changes by `Membership.renew`, while no job runs."""
        if self._membership is None:
            raise RuntimeError("Hosts serve only within their with block")
        return self._membership

    @property
    def members(self) -> tuple[Member, ...]:
        """The other hosts that take part now, by their numbers."""
        return self.membership.members

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which the hosts reach each other, this one first."""
        return self._address, *(member.address for member in self.members)

    @property
    def join_address(self) -> str:
        """HOST:PORT, for the others to type."""
        assert self._listener is not None, "Hosts serve only within their with block"
        return self._listener.join_address

    def run(
        self,
        job: Job,
        *,
        on_message: Callable[[Message], None],
        parts: Sequence[HostPart],
        grace_s: float = _GRACE_S,
        start_s: float = _START_S,
        membership: MembershipEvents | None = None,
    ) -> JobResult:
        """Start the job's ranks on all hosts and block until all have ended, as `ForkServer.run` does on one.

        `parts` holds one part per host, host 0 first; ranks are numbered host by host. A job whose ranks are all on one
        host has its rendezvous there, in a file; else rank 0 is on host 0, and the others reach it over the network. A
        lost host ends the job everywhere with RunFailed. `membership` may pause it: then it ends "paused", and
        its ranks' work is saved.
        """
        began_s = time.monotonic()
        jobs = _jobs_of_hosts(job, parts, hosts=1 + len(self.members))
        timeouts = PhaseTimeouts(start_s=start_s, grace_s=grace_s, host_s=self._heartbeat.lost_after_s + 1)
        with collected_signals() as signals, self._started(jobs) as sites:
            supervision = Supervision(sites, signals, on_message, timeouts, membership)
            self._stopped_by = supervision.run()
        return JobResult(stopped_by=self._stopped_by, wall_s=time.monotonic() - began_s, how=supervision.how)

    def run_on(self, member: Member, job: Job, on_message: Callable[[Message], None]) -> JobResult:
        """Run all ranks of a job on one host that takes part in no other, and block until they have ended: from any
        thread, also while the run's own ranks work. A lost host ends it with RunFailed."""
        began_s = time.monotonic()
        whole = replace(job, part=HostRanks(first_rank=0, ranks=job.world_size))
        site = RemoteWorkerHost(whole, member.link, host=str(member), number=next(self._numbers))
        timeouts = PhaseTimeouts(start_s=_START_S, grace_s=_GRACE_S, host_s=self._heartbeat.lost_after_s + 1)
        with collected_signals() as signals:
            site.start(None)
            supervision = Supervision([site], signals, on_message, timeouts)
            stopped_by = supervision.run()
        return JobResult(stopped_by=stopped_by, wall_s=time.monotonic() - began_s, how=supervision.how)

    @contextlib.contextmanager
    def _started(self, jobs: Mapping[int, Job]) -> Iterator[list[WorkerHost]]:
        """A WorkerHost for each host that has ranks, host 0's first, so that a later error leaves no ranks behind."""
        number = next(self._numbers)
        members = [self.members[host - 1] for host in jobs if host > 0]
        for member in members:
            if member.link.lost is not None:
                raise lost_host(str(member), member.link.lost)
        with ExitStack() as stack:
            meeting = self._meeting(stack, number) if len(jobs) > 1 else None
            sites: list[WorkerHost] = [stack.enter_context(self.server.start(jobs[0], meeting))] if 0 in jobs else []
            for member in members:
                site = RemoteWorkerHost(jobs[member.host], member.link, host=str(member), number=number)
                site.start(meeting.rendezvous if meeting else None)
                sites.append(site)
            yield sites

    def _meeting(self, stack: ExitStack, number: int) -> Rendezvous:
        """A port for the ranks' store on our address alone, held from before the first rank is started."""
        listener = stack.enter_context(listener_at(self._address, 0))
        place = joined_text(self._address, listener.getsockname()[1])
        return Rendezvous(rendezvous=f"tcp://{place}/job-{number}", interface=self._interface, listener=listener)


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


def _as_sentence(error: BaseException) -> str:
    if isinstance(error, PlaitError | KeyboardInterrupt):
        return str(error) or "stopped by Ctrl-C there"
    return f"ended by {type(error).__name__} there; see what it printed"


@contextmanager
def invited_hosts(
    request: HostsRequest,
    *,
    log: Log,
    entries: EntryTable,
    previous_hosts: Sequence[HostIdentity] = (),
    working: WorkingFolder = CURRENT_FOLDER,
    joining: JoinPolicy = "closed",
    kept_secret: Path | None = None,
    why_full: Callable[[int], str | None] = lambda others: None,
    program: str = "",
    join_options: str = "",
) -> Iterator[Hosts]:
    """Invite other hosts and wait until all have joined; the end of the block releases them.

    With a `program`, the hash of its file, only hosts that run the same one may join; the invitation then has
    `join_options`.

    Hosts in `previous_hosts`, matched by mark or name, keep their order; the others follow, sorted by address. A secret
    that is shown on a terminal is kept in the file `kept_secret`, for those that join later: with `joining` "open",
    unless `why_full` gives a sentence for the number of those that are in.

    Raises PlaitError where the address, the port or the secret cannot be used, or no host came for an hour.
    """
    address = choose_address(request.address)
    secret, advice = choose_secret(request.secret_file, kept=kept_secret)
    members = request.n_hosts - 1
    with Hosts(
        address=address,
        port=request.port,
        secret=secret,
        members=members,
        entries=entries,
        working_folder=working.path,
    ) as hosts:
        log(network_text(address))
        log(invitation_text(members, hosts.join_address, advice, join_options))

        def check(hello: Mapping[str, Any]) -> HostInfo:
            try:
                info = admitted_info(hello, own_host_info(program=program))
                if hosts.membership.is_complete and (sentence := why_full(len(hosts.members))):
                    raise PlaitError(sentence)
            except PlaitError as error:
                log(f"refused  {one_line(str(hello.get('name')))[:80]}: {one_line(str(error))}")
                raise
            log(f"joined   {info.name}: {counted(info.cores, 'core')}")
            return info

        arrived = hosts.membership.admit(
            check,
            JOIN_TIMEOUT_S,
            order=previous_hosts,
            on_lost=lambda name: log(f"lost     {name}"),
            on_failed=lambda count: log(f"refused  {failed_attempts_text(count)}"),
            joining=joining,
        )
        check_connectivity(ConnectivityListener(own_host_info().name, address), arrived)
        yield hosts
