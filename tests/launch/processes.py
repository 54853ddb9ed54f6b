"""What tests ask of the process table, and a record of what ranks told."""

from __future__ import annotations

import ipaddress
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.hosts.joining import HostInfo, own_host_info
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import Job, Message
from tests.entry_tables import entries_of

LISTEN = "0A"
ENTRIES = EntryTable(
    functions={
        **entries_of("tests.launch.entries").functions,
        "start_a_thread": "tests.launch.entries_with_thread:never",
        "break_the_start": "tests.launch.entries_broken_start:never",
        "hang_at_the_fork": "tests.launch.entries_that_hang:never",
        "tell_descriptor": "tests.launch.entries_with_asyncio:tell",
        "be_nowhere": "tests.launch.no_such_module:main",
    },
)
"""What the ranks of these tests do."""
WITH_TORCH = replace(ENTRIES, preload=("torch", "torch.distributed"))


def anybody(hello: Mapping[str, Any]) -> HostInfo:
    """Admits whoever proved to know the secret; a host that says only its name has what this one has."""
    return replace(own_host_info(), name=hello["name"])


def job(entry: str, world_size: int, *, argument: str = "", threads: int = 1, log_dir: str | None = None) -> Job:
    return Job(entry=entry, argument=argument, world_size=world_size, threads=threads, log_dir=log_dir)


class Record:
    """Keeps every message; calls `when_all_told` once, as soon as `world_size` ranks have told their pids."""

    def __init__(self, world_size: int = 0, when_all_told: Callable[[Record], None] = lambda record: None) -> None:
        self.messages: list[Message] = []
        self.pids: dict[int, int] = {}
        self.server_pid = 0
        self.acted_at_s = 0.0
        self._world_size = world_size
        self._when_all_told = when_all_told

    def __call__(self, message: Message) -> None:
        self.messages.append(message)
        if message.kind == "pid":
            self.pids[message.rank] = message.values["pid"]
            self.server_pid = message.values["server"]
            if len(self.pids) == self._world_size:
                self.acted_at_s = time.monotonic()
                self._when_all_told(self)

    @property
    def all_pids(self) -> list[int]:
        return [*self.pids.values(), self.server_pid]

    def values(self, kind: str) -> dict[int, Any]:
        return {message.rank: message.values for message in self.messages if message.kind == kind}


def is_running(pid: int) -> bool:
    """Whether the process table has a living process of this number (a zombie has ended)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_stopped(pid: int) -> bool:
    """Whether a SIGSTOP has reached a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T"


def running(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if is_running(pid)]


def wait_until(fact: Callable[[], bool], *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline, f"not so within {within_s} s"
        threading.Event().wait(0.005)


def listening_sockets(pid: int) -> set[str]:
    """The inodes of the TCP sockets on which a process listens."""
    return set(_own_listeners(pid))


def listening_addresses(pid: int) -> set[str]:
    """The addresses on which a process listens; 0.0.0.0 means all that the machine has."""
    return {_address(text) for text in _own_listeners(pid).values()}


def _own_listeners(pid: int) -> dict[str, str]:
    links = [_target(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    return {inode: text for inode, text in _listeners().items() if inode in own}


def _listeners() -> dict[str, str]:
    """Inode and address, as the kernel writes it, of every listening TCP socket."""
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    rows = [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
    return {row[9]: row[1].partition(":")[0] for row in rows if row[3] == LISTEN}


def _address(text: str) -> str:
    """The kernel writes the four words of an address as numbers of this machine."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


def open_descriptors(pid: int | str) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
