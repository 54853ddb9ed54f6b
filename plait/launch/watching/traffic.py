"""How many bytes the TCP connections of other processes have carried, read from the kernel without their help."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h and struct tcp_info of linux/tcp.h. Any user may ask.
_SOCK_DIAG, _BY_FAMILY, _DUMP, _DONE, _ERROR = 4, 20, 0x301, 3, 2
_HEADER = struct.Struct("=IHHII")
_QUERY = struct.Struct("=BBBxI48x")
_MESSAGE = struct.Struct("=BBBB2s2s16s16sI8xIIIII")
_ATTRIBUTE = struct.Struct("=HH")
_TCP_INFO, _ESTABLISHED, _CLOSE_WAIT = 2, 1, 8
_TCP_COUNTERS = struct.Struct("=120xQQ")
"""tcpi_bytes_acked and tcpi_bytes_received, which Linux has from 4.1 on."""
_ANSWER_BYTES, _ANSWER_S = 1 << 18, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that arrived at one process, or that the other end has acknowledged, on its open connections.

    `sends_to` is the address of the connection with the most bytes waiting to be sent, empty if none has any.
    """

    nbytes: int = 0
    sends_to: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Connection:
    inode: int
    nbytes: int
    waiting: int
    peer: str


def traffic_of(pids: Collection[int]) -> Mapping[int, Traffic]:
    """The traffic of this user's processes, without those that have no TCP connection or have ended; empty if the
    kernel does not say."""
    if not pids:
        return {}
    try:
        connections = {one.inode: one for one in _connections()}
    except (OSError, struct.error):  # a sandbox without this interface
        return {}
    found: dict[int, Traffic] = {}
    for pid in pids:
        own = [connections[inode] for inode in _socket_inodes(pid) if inode in connections]
        if own:
            busiest = max(own, key=lambda one: one.waiting)
            sends_to = busiest.peer if busiest.waiting else ""
            found[pid] = Traffic(nbytes=sum(one.nbytes for one in own), sends_to=sends_to)
    return found


def _socket_inodes(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                name = os.readlink(link)  # noqa: PTH115  no path: "socket:[123]"
                if name.startswith("socket:["):
                    yield int(name[8:-1])


def _connections() -> Iterator[_Connection]:
    """All TCP connections of this network namespace."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            states = 1 << _ESTABLISHED | 1 << _CLOSE_WAIT
            query = _QUERY.pack(family, socket.IPPROTO_TCP, 1 << (_TCP_INFO - 1), states)
            kernel.send(_HEADER.pack(_HEADER.size + len(query), _BY_FAMILY, _DUMP, 0, 0) + query)
            yield from _answer(kernel)


def _answer(kernel: socket.socket) -> Iterator[_Connection]:
    while True:
        data, at = kernel.recv(_ANSWER_BYTES), 0
        while at + _HEADER.size <= len(data):
            length, kind, _, _, _ = _HEADER.unpack_from(data, at)
            if kind in (_DONE, _ERROR) or length < _HEADER.size:
                return
            yield _parsed(data[at + _HEADER.size : at + length])
            at += (length + 3) & ~3


def _parsed(data: bytes) -> _Connection:
    family, _, _, _, _, _, _, peer, _, _, _, waiting, _, inode = _MESSAGE.unpack_from(data)
    nbytes, at = 0, _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            break
        if kind == _TCP_INFO and length >= _ATTRIBUTE.size + _TCP_COUNTERS.size:
            nbytes = sum(_TCP_COUNTERS.unpack_from(data, at + _ATTRIBUTE.size))
        at += (length + 3) & ~3
    address = socket.inet_ntop(family, peer[: 4 if family == socket.AF_INET else 16])
    return _Connection(inode=inode, nbytes=nbytes, waiting=waiting, peer=address.removeprefix("::ffff:"))
