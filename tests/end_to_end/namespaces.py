"""Hosts in network namespaces of this machine, each with a name and an address of its own; needs root."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab.leftovers import NAMESPACES, name_of_lab, remove, sweep
from benchmarks.lab.wiring import Command, Host, building, hosts_of, switch_of

CLONE_NEWUTS = 0x04000000
NAMES = "abcdefgh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """Hosts a, b, c, …, which all reach each other over one switch."""

    lab: str
    hosts: tuple[Host, ...]

    def enter(self, index: int, core: int | None = None) -> Callable[[], None]:
        """For a child process before its exec: it becomes one of this host, on one processor."""
        path, name = NAMESPACES / self.hosts[index].namespace, NAMES[index].encode()
        libc = ctypes.CDLL(None, use_errno=True)

        def become() -> None:
            descriptor = os.open(path, os.O_RDONLY)
            assert libc.setns(descriptor, 0) == 0
            os.close(descriptor)
            assert libc.unshare(CLONE_NEWUTS) == 0 and libc.sethostname(name, len(name)) == 0
            if core is not None:
                os.sched_setaffinity(0, {core})

        return become

    def address(self, index: int) -> str:
        return self.hosts[index].address

    def pull(self, index: int) -> None:
        """Take the cable out of a host."""
        self._carry_out(("ip", "-n", switch_of(self.lab), "link", "set", f"port{index}", "down"))

    def plug(self, index: int) -> None:
        """Put it in again."""
        self._carry_out(("ip", "-n", switch_of(self.lab), "link", "set", f"port{index}", "up"))

    def listens(self, index: int, port: int) -> bool:
        """Whether somebody on a host waits for connections at this port."""
        command = ("ip", "netns", "exec", self.hosts[index].namespace, "cat", "/proc/net/tcp")
        told = subprocess.run(command, capture_output=True, text=True, check=True)
        rows = [line.split() for line in told.stdout.splitlines()[1:]]
        return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)

    @staticmethod
    def _carry_out(command: Command) -> None:
        subprocess.run(command, capture_output=True, check=True)


@contextmanager
def network(hosts: int) -> Iterator[Net]:
    """So many hosts; at the end nothing of them is left."""
    sweep()
    lab = name_of_lab(os.getpid())
    net = Net(lab=lab, hosts=hosts_of(lab, (1.0,) * hosts))
    try:
        for command in building(lab, net.hosts):
            subprocess.run(command, capture_output=True, check=True)
        yield net
    finally:
        remove(lab)


def has_namespaces() -> bool:
    """Whether this user can make them here."""
    return os.geteuid() == 0 and Path("/usr/sbin/ip").exists() | Path("/sbin/ip").exists() | Path("/bin/ip").exists()
