"""Checks that the hosts of a run reach each other at any port and with packets of full size, as their workers need
to.

A firewall that drops incoming packets, the default of many systems, lets gloo and NCCL wait for minutes without a
word. So does a way on which only small packets pass, because two of its ends take different sizes (MTU).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from plait.checked_json import SingleLine
from plait.errors import PlaitError
from plait.hosts.joining import joined_text, listener_at
from plait.hosts.protocol import DONE, Handlers, Nothing, Peer, Reply, RequestKind

CONNECT_S = 5.0
ALL_PAIRS_AT_MOST = 16
AT_ONCE = 32
FULL_SIZED_BYTES = 32 << 10
"""Several packets of any size that is usual, and less than a kernel keeps for who has not looked yet."""
LARGE_PACKETS_LOST = "large packets are lost"
_LOOK_EVERY_S = 0.005
_Q = TypeVar("_Q")
_A = TypeVar("_A")


Firewall = Literal["unknown", "ufw", "firewalld", "nftables", "iptables", "NetworkPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """Where a host listens for the others, by its own address."""

    address: str
    port: int

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16:
            raise ValueError("ListenAddress.port is no port")
        ip_address(self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenListener:
    """Where a host listens, and the firewall that it reports, for the advice if it cannot be reached."""

    at: ListenAddress
    firewall: Firewall = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectQuestion:
    """The addresses to try."""

    addresses: tuple[ListenAddress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectReply:
    """For each address why it was not reached; empty where it was."""

    whys: tuple[SingleLine, ...]


OPEN_LISTENER = RequestKind(name="listen", question=Nothing, reply=OpenListener)
TRY_CONNECTING = RequestKind(name="connect", question=ConnectQuestion, reply=ConnectReply)
CLOSE_LISTENER = RequestKind(name="close", question=Nothing, reply=Nothing)


class Neighbour(Peer, Protocol):
    """A host of the run that answers requests: hosts.membership.Member, or this host itself."""

    @property
    def address(self) -> str: ...


class ConnectivityListener:
    """A host's listening socket at `address`, at any free port, and its attempts to connect to those of the others."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._listener: socket.socket | None = None

    @property
    def handlers(self) -> Handlers:
        """Handlers of host 0's requests."""
        return {OPEN_LISTENER: self._listen, TRY_CONNECTING: self._connect, CLOSE_LISTENER: self._close}

    def ask(self, request: RequestKind[_Q, _A], question: _Q, blob: bytes = b"") -> Reply[_A]:
        """Handle a request here, as `Member.ask` does on another host."""
        return self.handlers[request](question, blob)

    def close(self) -> None:
        """Close the listening socket."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _listen(self, _: Nothing, blob: bytes) -> Reply[OpenListener]:
        self.close()
        self._listener = listener_at(self.address, 0)
        at = ListenAddress(address=self.address, port=self._listener.getsockname()[1])
        return Reply(values=OpenListener(at=at, firewall=own_firewall()))

    def _connect(self, asked: ConnectQuestion, blob: bytes) -> Reply[ConnectReply]:
        """Try all addresses at once; the other kernel takes what is sent, so no process needs to answer."""
        with ThreadPoolExecutor(max(1, min(len(asked.addresses), AT_ONCE))) as pool:
            return Reply(values=ConnectReply(whys=tuple(pool.map(self._why_unreached, asked.addresses))))

    def _why_unreached(self, place: ListenAddress) -> str:
        try:
            with socket.create_connection(
                (place.address, place.port), timeout=CONNECT_S, source_address=(self.address, 0)
            ) as connection:
                connection.sendall(bytes(FULL_SIZED_BYTES))
                return "" if _is_acknowledged(connection) else LARGE_PACKETS_LOST
        except OSError as error:
            return str(error) or type(error).__name__

    def _close(self, _: Nothing, blob: bytes) -> Reply[Nothing]:
        self.close()
        return DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """`neighbour` tried to reach `host`; `why` says why it failed, and is empty where it did not."""

    host: Neighbour
    neighbour: Neighbour
    listener: OpenListener
    why: str


def check_connectivity(first: ConnectivityListener, others: Sequence[Neighbour]) -> None:
    """Raise PlaitError where one host of the run cannot reach another; `first` is this host's own.

    Up to `ALL_PAIRS_AT_MOST` hosts each tries all others; of more, each tries those 1, 2, 4, … after it and host 0:
    that finds a host that takes nothing, or that nothing leaves, though not each pair for which there is no way.
    """
    with contextlib.closing(_attempts(first, others)) as attempts:
        if failed := next((one for one in attempts if one.why), None):
            raise PlaitError(_unreachable(failed.host, failed.neighbour, failed.listener, failed.why))


def host_cut_off(first: ConnectivityListener, others: Sequence[Neighbour]) -> Neighbour | None:
    """The one of `others` in most of the pairs of hosts that do not reach each other; None where all do. Raises
    PlaitError where one is lost meanwhile."""
    ends = [end for one in _attempts(first, others) if one.why for end in (one.host, one.neighbour)]
    return max(others, key=lambda other: sum(end is other for end in ends)) if ends else None


def _attempts(first: ConnectivityListener, others: Sequence[Neighbour]) -> Generator[_Attempt, None, None]:
    """Each host's attempts to reach others, see `neighbours_of`."""
    hosts: list[Neighbour] = [first, *others]
    with contextlib.closing(first), ThreadPoolExecutor(min(len(hosts), AT_ONCE)) as pool:
        listeners = list(pool.map(lambda host: host.ask(OPEN_LISTENER, Nothing()).values, hosts))
        for host, opened in zip(hosts, listeners, strict=True):
            if opened.at.address != host.address:
                raise PlaitError(_translated(host, opened.at.address))
        rounds = [neighbours_of(at, len(hosts)) for at in range(len(hosts))]

        def connect(at: int) -> tuple[str, ...]:
            asked = ConnectQuestion(addresses=tuple(listeners[to].at for to in rounds[at]))
            return hosts[at].ask(TRY_CONNECTING, asked).values.whys

        for at, whys in enumerate(pool.map(connect, range(len(hosts)))):
            for to, why in zip(rounds[at], whys, strict=True):
                yield _Attempt(host=hosts[to], neighbour=hosts[at], listener=listeners[to], why=why)
        list(pool.map(lambda host: host.ask(CLOSE_LISTENER, Nothing()), hosts))


def neighbours_of(at: int, hosts: int) -> list[int]:
    """The numbers of those that host `at` of this many tries to reach."""
    if hosts <= ALL_PAIRS_AT_MOST:
        return [to for to in range(hosts) if to != at]
    powers = [1 << power for power in range(hosts.bit_length()) if 1 << power < hosts]
    return sorted({0, *((at + step) % hosts for step in powers)} - {at})


def _is_acknowledged(connection: socket.socket) -> bool:
    """Whether the other kernel has all that was sent, within the time of an attempt (SIOCOUTQ, tcp(7))."""
    deadline = time.monotonic() + CONNECT_S
    while struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]:
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


def _unreachable(host: Neighbour, neighbour: Neighbour, opened: OpenListener, why: str) -> str:
    place = joined_text(host.address, opened.at.port)
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


def own_firewall(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Firewall:
    """The firewall by the traces that anybody may read; "unknown" where there are none, which does not mean that there
    is no firewall."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "NetworkPolicy"
    if "ENABLED=yes" in _text(root / "etc/ufw/ufw.conf"):
        return "ufw"
    if (root / "run/firewalld").is_dir() or (root / "run/firewalld.pid").is_file():
        return "firewalld"
    if (
        "hook input" in _text(root / "etc/nftables.conf")
        and (root / "etc/systemd/system/sysinit.target.wants/nftables.service").is_symlink()
    ):
        return "nftables"
    return "iptables" if "filter" in _text(root / "proc/net/ip_tables_names") else "unknown"


def opening_advice(firewall: Firewall, source: str) -> str:
    """What to type where the firewall is, so that it takes what comes from an address."""
    family = "ip6" if ":" in source else "ip"
    tables = "ip6tables" if ":" in source else "iptables"
    match firewall:
        case "ufw":
            return f"ufw allow from {source}"
        case "firewalld":
            return f"firewall-cmd --zone=trusted --add-source={source}"
        case "nftables":
            return f"nft insert rule inet filter input {family} saddr {source} accept"
        case "iptables":
            return f"{tables} --insert INPUT --source {source} --jump ACCEPT"
        case "NetworkPolicy":
            return "a NetworkPolicy of the namespace that lets the run's pods talk to each other, as plait submit makes"
        case "unknown":
            return f"for example: ufw allow from {source}"


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
