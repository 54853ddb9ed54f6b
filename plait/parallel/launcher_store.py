"""The store of workers started by another launcher: torchrun's own, or one that rank 0 serves at MASTER_ADDR and
MASTER_PORT, as with torch.distributed's "env://" method."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import cache
from ipaddress import ip_address
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from plait.errors import PlaitError

APPEARS_WITHIN_S = 600.0
"""How long to wait for rank 0: a scheduler may start it minutes after the others."""
_ASK_AGAIN_S = 0.2


class _Served(NamedTuple):
    address: str
    """The address at which this process reaches it."""
    server: TCPStore


def launcher_has_store() -> bool:
    """Whether the launcher serves the store itself, as torchrun does by default."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_launcher_store(name: str, rank: int, stop: Callable[[], bool] = lambda: False) -> Store:
    """This rank's connection to the store, with separate keys under `name`. Raises PlaitError if rank 0 cannot listen,
    or is not found there, or `stop` says that waiting should end."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not launcher_has_store():
        if rank == 0:
            host = _serve(host, port).address
        else:
            _wait_for_server(host, port, stop)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"plait/{attempt}/{name}", TCPStore(host, port, is_master=False, wait_for_workers=False))


@cache
def _serve(host: str, port: int) -> _Served:
    """Serve the store, once: it ends with the last reference, which this process keeps."""
    listener = _listener(host, port)
    address: str = listener.getsockname()[0]
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return _Served(
        here, TCPStore(here, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    )


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens only at MASTER_ADDR; at all addresses if that is not one of this machine's, as for a
    service in Kubernetes, since others could not reach it otherwise."""
    for family, address in _places(host, port):
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise PlaitError(
                    f"rank 0 cannot listen at MASTER_ADDR = {host}, MASTER_PORT = {port}: another program has that "
                    "port; set another MASTER_PORT for all ranks"
                ) from None
            if error.errno != errno.EADDRNOTAVAIL:
                raise PlaitError(
                    f"rank 0 cannot listen at MASTER_ADDR = {host}, MASTER_PORT = {port} ({error.strerror}); set "
                    "another MASTER_PORT for all ranks"
                ) from None
        else:
            return listener
    raise AssertionError("every machine has the address 0.0.0.0")


def _places(host: str, port: int) -> Iterator[tuple[socket.AddressFamily, str]]:
    for family, address in _resolved(host, port):
        if not (ip_address(address).is_loopback and _others_are_elsewhere()):
            yield family, address
    yield socket.AF_INET, "0.0.0.0"


def _others_are_elsewhere() -> bool:
    """Whether some ranks could not reach an address of the loopback interface."""
    here = os.environ.get("LOCAL_WORLD_SIZE")
    return "KUBERNETES_SERVICE_HOST" in os.environ if here is None else here != os.environ.get("WORLD_SIZE")


def _resolved(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise PlaitError(
            f"MASTER_ADDR = {host!r} is not the name or address of a host that this machine knows ({error}); set it to "
            "the address of rank 0's host"
        ) from None
    return [(family, str(address[0])) for family, _, _, _, address in found]


def _wait_for_server(host: str, port: int, stop: Callable[[], bool]) -> None:
    """Block until rank 0 listens: TCPStore would print a warning each second."""
    deadline = time.monotonic() + APPEARS_WITHIN_S
    while True:
        _resolved(host, port)
        try:
            socket.create_connection((host, port), timeout=10).close()
        except OSError as error:
            if stop() or time.monotonic() > deadline:
                raise PlaitError(
                    f"nothing listens at MASTER_ADDR = {host}, MASTER_PORT = {port} ({error}); see what rank 0 "
                    "printed, and set both to where rank 0 runs"
                ) from None
            time.sleep(_ASK_AGAIN_S)
        else:
            return
