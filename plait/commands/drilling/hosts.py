"""Hosts for a drill that loses one: `plait join` in separate folders on this machine, without special rights."""

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

from plait.hosts.joining import ONE_HOST, HostsRequest
from plait.private_folder import make_private_folder

_ADDRESS, _LISTENING = "127.0.0.1", "0A"
_LOOK_S, _END_S = 0.05, 10.0
_ON_CORES = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); os.execv(sys.argv[2], sys.argv[2:])"
)


class DrillHosts:
    """Hosts besides this process, which leads; each gets its part of the cores while the block lasts.

    Their files lie below `folder`, which is deleted at the end of the block. `request` is for the leading command.
    """

    def __init__(self, members: int, folder: Path) -> None:
        self.request = ONE_HOST
        if members:
            secret = folder.absolute() / "secret"  # the leading command writes it
            self.request = HostsRequest(n_hosts=members + 1, address=_ADDRESS, port=_free_port(), secret_file=secret)
        self.has_lost_one = False
        """Since the hosts were invited last."""
        self._folder, self._members = folder.absolute(), range(1, members + 1)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._over, self._threads = threading.Event(), list[threading.Thread]()
        self._cores = sorted(os.sched_getaffinity(0))

    def __enter__(self) -> DrillHosts:
        if self._members:
            make_private_folder(self._folder)
            os.sched_setaffinity(0, self._cores_of(0))
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for host in self._members:
            self._kill(host)
        if self._members:
            os.sched_setaffinity(0, self._cores)
            shutil.rmtree(self._folder, ignore_errors=True)

    def invite(self) -> None:
        """Have all hosts join as soon as the leading command listens."""
        self.has_lost_one = False
        for host in self._members:
            thread = threading.Thread(target=self._join, args=(host,), name=f"drill-host-{host}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def lose(self, host: int) -> None:
        """Kill all processes of a host at once, as a power cut does."""
        self.has_lost_one = True
        self._kill(host)

    def run_folder(self, host: int, name: str) -> Path:
        """The place of a host's part of a run's files."""
        return self._folder / f"host-{host}" / "runs" / name

    def _join(self, host: int) -> None:
        if before := self._processes.get(host):  # its run is over, so it ends by itself
            with suppress(subprocess.TimeoutExpired):
                before.wait(_END_S)
            self._kill(host)
        while not _listens(self.request.port):
            if self._over.wait(_LOOK_S):
                return
        folder = self._folder / f"host-{host}"
        make_private_folder(folder)
        path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        cores = ",".join(map(str, self._cores_of(host)))
        join = ("join", f"{_ADDRESS}:{self.request.port}", "--secret-file", str(self.request.secret_file))
        with (folder / "join.log").open("ab") as log:
            self._processes[host] = subprocess.Popen(
                [sys.executable, "-c", _ON_CORES, cores, sys.executable, "-P", "-m", "plait", *join],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _kill(self, host: int) -> None:
        if process := self._processes.pop(host, None):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _cores_of(self, host: int) -> Sequence[int]:
        return self._cores[host :: self.request.n_hosts] or [self._cores[host % len(self._cores)]]


def _free_port() -> int:
    """Outside the range from which the kernel assigns ports."""
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return next(port for port in random.sample(range(least // 2, least), 100) if not _listens(port))


def _listens(port: int) -> bool:
    """Whether a process listens at a port, by the kernel's table."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port for row in rows)
