"""Whether the hosts of a run reach each other at ports of their choice, as their workers will need to.

A firewall that drops incoming packets, the default of many systems, lets gloo and NCCL wait for minutes without a word.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Protocol

from plait.checked_json import SingleLine
from plait.errors import PlaitError
from plait.launch.remote.link import Handler, Reply
from plait.launch.remote.listener import joined_text, listener_at
from plait.launch.remote.messages import parse_message
from plait.launch.remote.wire import Frame

KNOCK_S = 5.0


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
class KnockResult:
    """Why a knock at another host's door failed, or nothing."""

    why: SingleLine


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
        return Reply(values={"port": self._listener.getsockname()[1], "address": self.address})

    def _knock(self, frame: Frame) -> Reply:
        """The kernel takes who comes, so that nobody needs to answer the door."""
        door, why = parse_message(Door, frame.values), ""
        try:
            socket.create_connection(
                (door.address, door.port), timeout=KNOCK_S, source_address=(self.address, 0)
            ).close()
        except OSError as error:
            why = str(error) or type(error).__name__
        return Reply(values={"why": why})

    def _shut(self, frame: Frame) -> Reply:
        self.close()
        return Reply()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Knock:
    """`neighbour` tried to reach `host`; `why` says why it failed, and is empty where it did not."""

    host: Neighbour
    neighbour: Neighbour
    port: int
    why: str


def check_connectivity(first: ConnectivityListener, others: Sequence[Neighbour]) -> None:
    """Raise PlaitError with the mend where one host of the run cannot reach another; `first` is this host's own."""
    with contextlib.closing(_knocks(first, others)) as knocks:
        if failed := next((one for one in knocks if one.why), None):
            raise PlaitError(_shut_out(failed.host, failed.neighbour, failed.port, failed.why))


def host_cut_off(first: ConnectivityListener, others: Sequence[Neighbour]) -> Neighbour | None:
    """The one of `others` in most of the pairs of hosts that do not reach each other; None where all do. Raises
    PlaitError where one is lost meanwhile."""
    ends = [end for one in _knocks(first, others) if one.why for end in (one.host, one.neighbour)]
    return max(others, key=lambda other: sum(end is other for end in ends)) if ends else None


def _knocks(first: ConnectivityListener, others: Sequence[Neighbour]) -> Generator[_Knock, None, None]:
    """Each host's attempt to reach each other one."""
    hosts: list[Neighbour] = [first, *others]
    with contextlib.closing(first), ThreadPoolExecutor(len(hosts)) as pool:
        for host in hosts:
            opened = parse_message(Door, host.ask("door", {}).values)
            port = opened.port
            if opened.address != host.address:
                raise PlaitError(_translated(host, opened.address))
            guests = [neighbour for neighbour in hosts if neighbour is not host]
            requested = [
                pool.submit(neighbour.ask, "knock", {"address": host.address, "port": port}) for neighbour in guests
            ]
            for neighbour, one in zip(guests, requested, strict=True):
                why = parse_message(KnockResult, one.result().values).why
                yield _Knock(host=host, neighbour=neighbour, port=port, why=why)
            host.ask("shut", {})


def _shut_out(host: Neighbour, neighbour: Neighbour, port: int, why: str) -> str:
    return (
        f"{neighbour.name} ({neighbour.address}) does not reach {host.name} at {joined_text(host.address, port)} "
        f"({why}): workers meet at ports of their own choice; let the firewall of {host.address} take what comes from "
        f"{neighbour.address} (for example: ufw allow from {neighbour.address}), then give the same command again"
    )


def _translated(host: Neighbour, own: str) -> str:
    return (
        f"{host.name} is {own} to itself and {host.address} to this host: an address translation or a tunnel lies in "
        "between, and workers could not meet; join from a network in which all hosts reach each other"
    )
