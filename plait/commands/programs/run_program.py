"""`plait run`: starts the workers of a person's program, on this machine or on several, and waits for their end."""

from __future__ import annotations

import fcntl
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from plait.checked_json import one_line
from plait.commands.programs.program_file import (
    COUNT_ENTRY,
    PROGRAM_ENTRIES,
    PROGRAM_ENTRY,
    ProgramFile,
    program_hash,
    program_in_environment,
)
from plait.commands.programs.restarting import ProgramRestarts
from plait.custom.process.launcher import SAVED
from plait.errors import PlaitError, StopSignal
from plait.hosts.connectivity import ConnectivityListener, check_connectivity
from plait.hosts.joining import FULL_SENTENCE, ONE_HOST, HostsRequest, own_host_info
from plait.hosts.leader import HostPart, Hosts, invited_hosts
from plait.hosts.membership import Membership
from plait.launch.local.run import ForkServer
from plait.launch.local.site import WorkerHost
from plait.launch.values.failure import WorkersFailed
from plait.launch.values.job import RANKS_AT_MOST, Job, JobResult, Message, StoppedBy
from plait.machines.machine import usable_cores
from plait.private_folder import make_private_folder
from plait.regular_file import append_to_file
from plait.screen.screen import Screen
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

LOCK = ".lock"
"""In a folder of logs: it is locked as long as a run has that folder."""


def run_program(
    program: ProgramFile,
    arguments: Sequence[str] = (),
    *,
    workers: int | None = None,
    hosts: HostsRequest = ONE_HOST,
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
) -> StoppedBy:
    """Run a program on `workers` workers of each host: one for each GPU, or one with all cores, if left out.

    Blocks until all have ended; returns what ended them. What the first worker prints comes to the terminal, what the
    others print to files. A program that has saved and loses a worker or a host is started again on those that are
    left, and once more after a save with a host that came back. Raises PlaitError before a worker starts, ProgramFailed
    with the culprit's traceback printed, RunFailed where a worker or a host was lost and the program could not go on by
    itself.
    """
    if workers is not None and not 1 <= workers <= RANKS_AT_MOST:
        raise PlaitError(f"{workers} workers on a machine; choose 1 to {RANKS_AT_MOST}")
    digest = program_hash(program.path)
    asked = {"sha256": digest, "arguments": list(arguments), "seed": secrets.randbelow(2**31)}
    with log_folder(program.name.removesuffix(".py"), working) as logs, program_in_environment(program):
        opened = _one_host() if hosts.n_hosts == 1 else _several_hosts(hosts, digest, program.join_options, screen)
        restarts, announced = ProgramRestarts(program.name, logs), list[int]()
        with opened as group:
            while True:
                restarts.begins()
                try:
                    counts = [workers] * group.hosts if workers is not None else group.count()
                    if (hosts.n_hosts > 1 or sum(counts) > 1) and counts != announced:
                        screen.print(workers_text(counts, logs if sum(counts) > 1 else None))
                    announced = counts
                    threads = [max(1, cores // count) for cores, count in zip(group.cores, counts, strict=True)]
                    argument = json.dumps({**asked, "saved_in": restarts.saved.folder if restarts.saved else ""})
                    result = group.run(argument, counts, threads, str(logs), restarts.on_message)
                    if result.how == "over":
                        return result.stopped_by
                except WorkersFailed as error:
                    screen.print(restarts.after(error))
                if came := group.renew():
                    screen.print(restarts.with_hosts(came))


def workers_text(counts: Sequence[int], logs: Path | None) -> str:
    """How many workers a program gets, and where the others print."""
    where = "" if len(counts) == 1 else f" on {len(counts)} hosts: {' + '.join(map(str, counts))}"
    output = f"; rank 0 prints here, the other ranks print to files in {logs}" if logs else ""
    return f"workers  {sum(counts)}{where}{output}"


_OnMessage = Callable[[Message], None]


class _ProgramGroup(Protocol):
    """The hosts that run a program."""

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        ...

    @property
    def cores(self) -> Sequence[int]:
        """The cores of each of them."""
        ...

    def count(self) -> list[int]:
        """How many workers each host has devices for."""
        ...

    def run(
        self, argument: str, counts: Sequence[int], threads: Sequence[int], logs: str, on_message: _OnMessage
    ) -> JobResult:
        """Run the program with this many workers a host, and threads a worker; blocks to the end."""
        ...

    def renew(self) -> Sequence[str]:
        """Go on with the hosts that are left and those that wait, whose names are returned; call it while no worker
        runs."""
        ...


class _OneHost:
    hosts = 1

    def __init__(self, server: ForkServer) -> None:
        self._server, self.cores = server, [usable_cores()]

    def count(self) -> list[int]:
        found: dict[int, Mapping[str, Any]] = {}
        job = Job(entry=COUNT_ENTRY, argument="", world_size=1, threads=1, at_stop="abandon")
        self._server.run(job, on_message=_collect(found)).require_finished()
        return [int(found[0]["workers"])]

    def run(
        self, argument: str, counts: Sequence[int], threads: Sequence[int], logs: str, on_message: _OnMessage
    ) -> JobResult:
        return self._server.run(_job(argument, counts, threads, logs), on_message=on_message)

    def renew(self) -> Sequence[str]:
        """This one is all there is."""
        return ()


class _SeveralHosts:
    def __init__(self, hosts: Hosts, screen: Screen) -> None:
        self._hosts, self._screen = hosts, screen

    @property
    def hosts(self) -> int:
        return 1 + len(self._hosts.members)

    @property
    def cores(self) -> Sequence[int]:
        return [usable_cores(), *(member.host_info.cores for member in self._hosts.members)]

    def count(self) -> list[int]:
        found: dict[int, Mapping[str, Any]] = {}
        job = Job(entry=COUNT_ENTRY, argument="", world_size=self.hosts, threads=1, at_stop="abandon")
        parts = [HostPart(ranks=1, threads=1, argument="") for _ in range(self.hosts)]
        self._hosts.run(job, on_message=_collect(found), parts=parts).require_finished()
        counts = [found.get(host, {}).get("workers") for host in range(self.hosts)]
        if not all(isinstance(count, int) and 1 <= count <= RANKS_AT_MOST for count in counts):
            raise PlaitError(
                "a host does not say how many workers it has; install the same commit of plait on all hosts"
            )
        return [int(count) for count in counts if count]

    def run(
        self, argument: str, counts: Sequence[int], threads: Sequence[int], logs: str, on_message: _OnMessage
    ) -> JobResult:
        pairs = zip(counts, threads, strict=True)
        parts = [
            HostPart(ranks=count, threads=each, argument=argument, log_dir=logs if host == 0 else None)
            for host, (count, each) in enumerate(pairs)
        ]
        membership = self._hosts.membership

        def hear(message: Message) -> None:
            on_message(message)
            if message.rank == 0 and message.kind == SAVED:
                membership.may_take_in()

        job = _job(argument, counts, threads, logs)
        return self._hosts.run(job, on_message=hear, parts=parts, membership=_Returning(membership))

    def renew(self) -> Sequence[str]:
        """A host that does not reach all others is sent home."""
        came = []
        for member in self._hosts.membership.renew().came:
            try:
                check_connectivity(ConnectivityListener(own_host_info().name, self._hosts.addresses[0]), [member])
            except PlaitError as error:
                self._screen.print(f"refused  {member.name}: {one_line(str(error))}")
                self._hosts.membership.send_home([member], str(error))
            else:
                came.append(member.name)
        return came


class _Returning:
    """Hosts that come back to a program. One that its user stops ends the program, which may have saved nothing yet."""

    def __init__(self, membership: Membership) -> None:
        self.fileno, self.look = membership.fileno, membership.look
        self._membership = membership

    @property
    def wants_pause(self) -> bool:
        """Whether hosts wait, and the program has saved since."""
        return self._membership.wants_pause

    def lets_go(self, site: WorkerHost, by: StopSignal) -> bool:
        """Never."""
        return False


@contextmanager
def _one_host() -> Iterator[_ProgramGroup]:
    with ForkServer(PROGRAM_ENTRIES) as server:
        yield _OneHost(server)


@contextmanager
def _several_hosts(request: HostsRequest, digest: str, options: str, screen: Screen) -> Iterator[_ProgramGroup]:
    """The hosts that joined with the same program; the end of the block releases them."""
    with invited_hosts(
        request, log=screen.print, entries=PROGRAM_ENTRIES, program=digest, join_options=options, joining="open",
        why_full=lambda others: None if others < request.n_hosts - 1 else FULL_SENTENCE,
    ) as hosts:  # fmt: skip
        yield _SeveralHosts(hosts, screen)


def _job(argument: str, counts: Sequence[int], threads: Sequence[int], logs: str) -> Job:
    return Job(
        entry=PROGRAM_ENTRY,
        argument=argument,
        world_size=sum(counts),
        threads=threads[0],
        log_dir=logs,
        at_stop="abandon",
    )


@contextmanager
def log_folder(name: str, working: WorkingFolder) -> Iterator[Path]:
    """An empty folder for what the workers print: NAME, or NAME-2 and so on while other runs have those before."""
    make_private_folder(working.cache)
    for number in count(1):
        folder = working.cache / "programs" / (name if number == 1 else f"{name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        with append_to_file(folder / LOCK) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:  # a disk without locks: take the folder unlocked
                pass
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name != LOCK:
                    path.unlink(missing_ok=True)
            yield folder
            return


def _collect(found: dict[int, Mapping[str, Any]]) -> _OnMessage:
    def collect(message: Message) -> None:
        if message.kind == "workers":
            found[message.rank] = message.values

    return collect
