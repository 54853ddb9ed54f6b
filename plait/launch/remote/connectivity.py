"""Whether the hosts of a run reach each other at ports of their choice, with packets of full size, as their workers
will need to.

A firewall that drops incoming packets, the default of many systems, lets gloo and NCCL wait for minutes without a
word. So does a way on which only small packets pass, because two of its ends take different sizes (MTU).
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Protocol

from plait.checked_json import SingleLine
from plait.errors import PlaitError
from plait.launch.network.firewall import Firewall, opening_advice, own_firewall
from plait.launch.remote.link import Handler, Reply
from plait.launch.remote.listener import joined_text, listener_at
from plait.launch.remote.messages import parse_message
from plait.launch.remote.wire import Frame

KNOCK_S = 5.0
ALL_PAIRS_AT_MOST = 16
AT_ONCE = 32
FULL_SIZED_BYTES = 32 << 10
"""Several packets of any size that is usual, and less than a kernel keeps for who has not looked yet."""
LARGE_PACKETS_LOST = "large packets are lost"
_LOOK_EVERY_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where a host listens for the others, by its own address."""

    address: str
    port: int

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16:
            raise ValueError("Door.port is no port")
        ip_address(self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDoor:
    """A host's door, and the firewall that the host says to have, for who does not get to it."""

    address: str
    port: int
    firewall: Firewall = "unknown"

    def __post_init__(self) -> None:
        Door(address=self.address, port=self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """At which doors to knock."""

    doors: tuple[Door, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnockResults:
    """Why a knock at each of the doors failed, or nothing."""

    whys: tuple[SingleLine, ...]


class Neighbour(Protocol):
    """A host of the run that answers requests: launch.remote.leader.Member, or this host itself."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    def ask(self, kind: str, values: Mapping[str, Any]) -> Frame | Reply: ...


class ConnectivityListener:
    """A host's listening socket at `address`, at any free port, and its attempts to connect to those of the others."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._listener: socket.socket | None = None

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Handlers of host 0's requests, by kind."""
        return {"door": self._open, "knock": self._knock, "shut": self._shut}

    def ask(self, kind: str, values: Mapping[str, Any]) -> Reply:
        """Handle a request here, as `Member.ask` does on another host."""
        return self.handlers[kind](Frame(kind=kind, values=values))

    def close(self) -> None:
        """Close the listening socket."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _open(self, frame: Frame) -> Reply:
        self.close()
        self._listener = listener_at(self.address, 0)
        port = self._listener.getsockname()[1]
        return Reply(values={"port": port, "address": self.address, "firewall": own_firewall()})

    def _knock(self, frame: Frame) -> Reply:
        """At all doors at once; the kernel takes who comes, and what is sent, so that nobody needs to answer one."""
        doors = parse_message(Doors, frame.values).doors
        with ThreadPoolExecutor(max(1, min(len(doors), AT_ONCE))) as pool:
            return Reply(values={"whys": list(pool.map(self._why_closed, doors))})

    def _why_closed(self, door: Door) -> str:
        try:
            with socket.create_connection(
                (door.address, door.port), timeout=KNOCK_S, source_address=(self.address, 0)
            ) as connection:
                connection.sendall(bytes(FULL_SIZED_BYTES))
                return "" if _is_acknowledged(connection) else LARGE_PACKETS_LOST
        except OSError as error:
            return str(error) or type(error).__name__

    def _shut(self, frame: Frame) -> Reply:
        self.close()
        return Reply()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Knock:
    """`neighbour` tried to reach `host`; `why` says why it failed, and is empty where it did not."""

    host: Neighbour
    neighbour: Neighbour
    door: OpenedDoor
    why: str


def check_connectivity(first: ConnectivityListener, others: Sequence[Neighbour]) -> None:
    """Raise PlaitError with the mend where one host of the run cannot reach another; `first` is this host's own.

    Up to `ALL_PAIRS_AT_MOST` hosts each knocks at all others; of more, each at those 1, 2, 4, … after it and at host 0:
    that finds a host that takes nothing, or that nothing leaves, though not each pair for which there is no way.
    """
    with contextlib.closing(_knocks(first, others)) as knocks:
        if failed := next((one for one in knocks if one.why), None):
            raise PlaitError(_shut_out(failed.host, failed.neighbour, failed.door, failed.why))


def host_cut_off(first: ConnectivityListener, others: Sequence[Neighbour]) -> Neighbour | None:
    """The one of `others` in most of the pairs of hosts that do not reach each other; None where all do. Raises
    PlaitError where one is lost meanwhile."""
    ends = [end for one in _knocks(first, others) if one.why for end in (one.host, one.neighbour)]
    return max(others, key=lambda other: sum(end is other for end in ends)) if ends else None


def _knocks(first: ConnectivityListener, others: Sequence[Neighbour]) -> Generator[_Knock, None, None]:
    """Each host's attempts to reach others, see `neighbours_of`."""
    hosts: list[Neighbour] = [first, *others]
    with contextlib.closing(first), ThreadPoolExecutor(min(len(hosts), AT_ONCE)) as pool:
        doors = list(pool.map(lambda host: parse_message(OpenedDoor, host.ask("door", {}).values), hosts))
        for host, opened in zip(hosts, doors, strict=True):
            if opened.address != host.address:
                raise PlaitError(_translated(host, opened.address))
        rounds = [neighbours_of(at, len(hosts)) for at in range(len(hosts))]

        def knock(at: int) -> tuple[str, ...]:
            named = [{"address": doors[to].address, "port": doors[to].port} for to in rounds[at]]
            return parse_message(KnockResults, hosts[at].ask("knock", {"doors": named}).values).whys

        for at, whys in enumerate(pool.map(knock, range(len(hosts)))):
            for to, why in zip(rounds[at], whys, strict=True):
                yield _Knock(host=hosts[to], neighbour=hosts[at], door=doors[to], why=why)
        list(pool.map(lambda host: host.ask("shut", {}), hosts))


def neighbours_of(at: int, hosts: int) -> list[int]:
    """The numbers of those at whose doors host `at` of so many knocks."""
    if hosts <= ALL_PAIRS_AT_MOST:
        return [to for to in range(hosts) if to != at]
    powers = [1 << power for power in range(hosts.bit_length()) if 1 << power < hosts]
    return sorted({0, *((at + step) % hosts for step in powers)} - {at})


def _is_acknowledged(connection: socket.socket) -> bool:
    """Whether the other kernel has all that was sent, within a knock's time (SIOCOUTQ, tcp(7))."""
    deadline = time.monotonic() + KNOCK_S
    while struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]:
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


def _shut_out(host: Neighbour, neighbour: Neighbour, opened: OpenedDoor, why: str) -> str:
    place = joined_text(host.address, opened.port)
    if why == LARGE_PACKETS_LOST:
        return (
            f"{neighbour.name} ({neighbour.address}) reaches {host.name} at {place}, but large packets between them "
            f"are lost; give the interfaces of all hosts, and the switches between them, the same MTU (ip link shows "
            f"it; ip link set dev NAME mtu 1500), then give the same command again"
        )
    said = "" if opened.firewall == "unknown" else f", which has {opened.firewall},"
    return (
        f"{neighbour.name} ({neighbour.address}) does not reach {host.name} at {place} ({why}): workers meet at "
        f"ports of their own choice; let the firewall of {host.address}{said} take what comes from {neighbour.address} "
        f"({opening_advice(opened.firewall, neighbour.address)}), then give the same command again"
    )


def _translated(host: Neighbour, own: str) -> str:
    return (
        f"{host.name} is {own} to itself and {host.address} to this host: an address translation or a tunnel lies in "
        "between, and workers could not meet; join from a network in which all hosts reach each other"
    )
