"""Hosts for a drill that loses some: `plait join` in folders of their own on this machine, which need no rights."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from plait.commands.hosts.invitation import ONE_HOST, HostsRequest
from plait.launch.remote.secret import new_secret
from plait.private_folder import make_private_folder

_ADDRESS, _LISTENING = "127.0.0.1", "0A"
_LOOK_S, _END_S = 0.05, 10.0
_ON_CORES = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); os.execv(sys.argv[2], sys.argv[2:])"
)


class LentHosts:
    """So many hosts besides this process, which leads; each gets its part of the cores while the block lasts.

    Their files lie below `folder`, which is gone at the block's end.
    """

    def __init__(self, members: int, folder: Path) -> None:
        self._folder = folder.absolute()
        self._members: dict[int, subprocess.Popen[bytes]] = {}
        self.lost: set[int] = set()
        """Hosts that were lost since they were invited last."""
        self._over, self._threads = threading.Event(), list[threading.Thread]()
        self._cores = sorted(os.sched_getaffinity(0))
        secret_file = self._folder / "secret"
        self._request = (
            HostsRequest(n_hosts=members + 1, address=_ADDRESS, port=_free_port(), secret_file=secret_file)
            if members
            else ONE_HOST
        )

    def __enter__(self) -> LentHosts:
        if self._members_asked:
            make_private_folder(self._folder)
            secret_file = self._request.secret_file
            assert secret_file is not None
            descriptor = os.open(secret_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{new_secret().text}\n")
            os.sched_setaffinity(0, self._cores_of(0))
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for host in tuple(self._members):
            self._kill(host)
        if self._members_asked:
            os.sched_setaffinity(0, self._cores)
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def request(self) -> HostsRequest:
        """What the leading command is told."""
        return self._request

    def invite(self) -> None:
        """Have all join, as soon as the leading command listens."""
        self.lost.clear()
        for host in range(1, self._members_asked + 1):
            thread = threading.Thread(target=self._join, args=(host,), name=f"drill-host-{host}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def lose(self, host: int) -> None:
        """Kill all processes of a host at once, as a power cut does."""
        self.lost.add(host)
        self._kill(host)

    def run_folder(self, host: int, name: str) -> Path:
        """Where a host has its part of a run's files."""
        return self._folder / f"host-{host}" / "runs" / name

    def _kill(self, host: int) -> None:
        member = self._members.pop(host, None)
        if member is not None:
            with suppress(ProcessLookupError):
                os.killpg(member.pid, signal.SIGKILL)
            member.wait()

    @property
    def _members_asked(self) -> int:
        return self._request.n_hosts - 1

    def _cores_of(self, host: int) -> Sequence[int]:
        hosts = self._request.n_hosts
        return self._cores[host::hosts] or [self._cores[host % len(self._cores)]]

    def _join(self, host: int) -> None:
        before = self._members.get(host)
        if before is not None:  # of a job that is over: it goes home by itself
            with suppress(subprocess.TimeoutExpired):
                before.wait(_END_S)
            self._kill(host)
        while not _listens(self._request.port):
            if self._over.wait(_LOOK_S):
                return
        folder = self._folder / f"host-{host}"
        make_private_folder(folder)
        path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        cores = ",".join(map(str, self._cores_of(host)))
        join = ("join", f"{_ADDRESS}:{self._request.port}", "--secret-file", str(self._request.secret_file))
        with (folder / "join.log").open("ab") as log:
            self._members[host] = subprocess.Popen(
                [sys.executable, "-c", _ON_CORES, cores, sys.executable, "-P", "-m", "plait", *join],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _free_port() -> int:
    """One that the kernel gives to nobody who asks for any."""
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return next(port for port in random.sample(range(least // 2, least), 100) if not _listens(port))


def _listens(port: int) -> bool:
    """Whether somebody waits for connections at a port, as the kernel has it."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port for row in rows)
