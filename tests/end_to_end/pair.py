"""Two hosts, which are two addresses and two folders of this machine."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

from tests.end_to_end.command import Place, wait_while_running

CORES = sorted(os.sched_getaffinity(0))
HALVES = (CORES[: max(1, len(CORES) // 2)], CORES[-max(1, len(CORES) // 2) :])
"""A host each: its one worker then has the threads that one of two workers has on the whole machine."""

EVEN = ("layout.shares=[4, 3]", 'balance.every="never"')
"""The shares of equal workers: what these hosts measure of each other hangs on what else the machine does."""


class Pair:
    """Host 0, and a folder for the other one; both are told the secret by a file outside of their folders."""

    def __init__(self, lead: Place, other: Place, secret: Path) -> None:
        self.lead, self.other, self.secret = lead, other, secret
        self.port = free_port()

    def start_lead(self, name: str, *more: str) -> subprocess.Popen[str]:
        """Start host 0, and wait until others can join."""
        return self.start_command("train", "tiny.toml", f"run.name={name}", *more)

    def start_command(self, *words: str) -> subprocess.Popen[str]:
        """Start a command on host 0, and wait until others can join."""
        process = self.lead.start(
            *(*words, "--hosts", "2", "--address", "127.0.0.1"),
            *("--port", str(self.port), "--secret-file", str(self.secret)),
            preexec_fn=lambda: os.sched_setaffinity(0, HALVES[0]),
        )
        wait_while_running(lambda: listens(self.port), process)
        return process

    def start_join(self, place: Place | None = None, secret: Path | None = None) -> subprocess.Popen[str]:
        return (place or self.other).start(
            *("join", f"127.0.0.1:{self.port}", "--secret-file", str(secret or self.secret)),
            preexec_fn=lambda: os.sched_setaffinity(0, HALVES[1]),
        )

    def start(self, name: str, *more: str) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
        return self.start_lead(name, *more), self.start_join()

    def assert_nothing_left(self) -> None:
        """No process, no port, nothing half written on either host."""
        for place in (self.lead, self.other):
            place.assert_nobody_left()
            assert not list(place.folder.glob("runs/*/checkpoints/.*")), place.folder
            names = [path.name for path in place.folder.rglob("*")]
            assert not [name for name in names if name.startswith(("nonce-", "plait-")) or name.endswith(".part")]
        assert not listens(self.port)


def free_port() -> int:
    """One that the kernel deals to nobody who asks for any: no stranger listens there once plait has closed it."""
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return next(port for port in random.sample(range(least // 2, least), 100) if not listens(port))


def listens(port: int) -> bool:
    """Whether somebody waits for connections at a port, as the kernel has it."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port for row in rows)
