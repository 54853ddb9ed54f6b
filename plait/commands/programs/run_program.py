"""`plait run`: starts the workers of a person's program, on this machine or on several, and waits for their end."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from plait.commands.programs.program_file import (
    COUNT_ENTRY,
    PROGRAM_ENTRIES,
    PROGRAM_ENTRY,
    program_hash,
    program_in_environment,
)
from plait.errors import PlaitError
from plait.hosts.joining import ONE_HOST, HostsRequest
from plait.hosts.leader import HostPart, Hosts, invited_hosts
from plait.launch.local.run import ForkServer
from plait.launch.values.job import RANKS_AT_MOST, Job, JobResult, Message, StoppedBy
from plait.machines.machine import usable_cores
from plait.private_folder import make_private_folder
from plait.screen.screen import Screen
from plait.working_folder import CURRENT_FOLDER, WorkingFolder


def run_program(
    program: Path,
    arguments: Sequence[str] = (),
    *,
    workers: int | None = None,
    hosts: HostsRequest = ONE_HOST,
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
) -> StoppedBy:
    """Run a program file on `workers` workers of each host: one for each GPU, or one with all cores, if left out.

    Blocks until all have ended; returns what ended them. What the first worker prints comes to the terminal, what the
    others print to files. Raises PlaitError before a worker starts, ProgramFailed with the culprit's traceback printed,
    RunFailed where a worker or a host was lost.
    """
    if workers is not None and not 1 <= workers <= RANKS_AT_MOST:
        raise PlaitError(f"{workers} workers on a machine; choose 1 to {RANKS_AT_MOST}")
    digest = program_hash(program)
    logs = _log_folder(program, working)
    argument = json.dumps({"sha256": digest, "arguments": list(arguments), "seed": secrets.randbelow(2**31)})
    with program_in_environment(program):
        opened = _one_host() if hosts.n_hosts == 1 else _several_hosts(hosts, digest, invitation_of(program), screen)
        with opened as group:
            counts = [workers] * group.hosts if workers is not None else group.count()
            if hosts.n_hosts > 1 or sum(counts) > 1:
                screen.print(workers_text(counts, logs if sum(counts) > 1 else None))
            threads = [max(1, cores // count) for cores, count in zip(group.cores, counts, strict=True)]
            return group.run(argument, counts, threads, str(logs)).stopped_by


def workers_text(counts: Sequence[int], logs: Path | None) -> str:
    """How many workers a program gets, and where the others print."""
    where = "" if len(counts) == 1 else f" on {len(counts)} hosts: {' + '.join(map(str, counts))}"
    told = f"; rank 0 prints here, the other ranks print to files in {logs}" if logs else ""
    return f"workers  {sum(counts)}{where}{told}"


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

    def run(self, argument: str, counts: Sequence[int], threads: Sequence[int], logs: str) -> JobResult:
        """Run the program with this many workers a host, and threads a worker; blocks to the end."""
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

    def run(self, argument: str, counts: Sequence[int], threads: Sequence[int], logs: str) -> JobResult:
        job = _job(argument, counts, threads, logs)
        return self._server.run(job, on_message=_ignore)


class _SeveralHosts:
    def __init__(self, hosts: Hosts) -> None:
        self._hosts, self.hosts = hosts, 1 + len(hosts.members)
        self.cores = [usable_cores(), *(member.host_info.cores for member in hosts.members)]

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

    def run(self, argument: str, counts: Sequence[int], threads: Sequence[int], logs: str) -> JobResult:
        pairs = zip(counts, threads, strict=True)
        parts = [
            HostPart(ranks=count, threads=each, argument=argument, log_dir=logs if host == 0 else None)
            for host, (count, each) in enumerate(pairs)
        ]
        return self._hosts.run(_job(argument, counts, threads, logs), on_message=_ignore, parts=parts)


@contextmanager
def _one_host() -> Iterator[_ProgramGroup]:
    with ForkServer(PROGRAM_ENTRIES) as server:
        yield _OneHost(server)


@contextmanager
def _several_hosts(request: HostsRequest, digest: str, options: str, screen: Screen) -> Iterator[_ProgramGroup]:
    """The hosts that joined with the same program; the end of the block releases them."""
    with invited_hosts(
        request, log=screen.print, entries=PROGRAM_ENTRIES, program=digest, join_options=options
    ) as hosts:
        yield _SeveralHosts(hosts)


def invitation_of(program: Path) -> str:
    """What follows HOST:PORT on the other hosts."""
    return f" --program {program.name}"


def _job(argument: str, counts: Sequence[int], threads: Sequence[int], logs: str) -> Job:
    return Job(
        entry=PROGRAM_ENTRY,
        argument=argument,
        world_size=sum(counts),
        threads=threads[0],
        log_dir=logs,
        at_stop="abandon",
    )


def _log_folder(program: Path, working: WorkingFolder) -> Path:
    """An empty folder for what the workers print."""
    make_private_folder(working.cache)
    folder = working.cache / "programs" / program.stem
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _collect(found: dict[int, Mapping[str, Any]]) -> Any:
    def collect(message: Message) -> None:
        if message.kind == "workers":
            found[message.rank] = message.values

    return collect


def _ignore(message: Message) -> None:
    """Programs print by themselves."""
