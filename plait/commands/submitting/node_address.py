"""The address at which the other nodes of a job reach this one, by the name that its scheduler gave it."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from ipaddress import ip_address

from plait.errors import PlaitError
from plait.launch.network.interface import local_addresses
from plait.screen.screen import Screen

NAME_AT_LATEST_S = 180.0
"""Names of pods are known some time after the pods are."""
_LOOK_EVERY_S = 0.5


def own_address(name: str, screen: Screen) -> str:
    """The address at which the others reach this host, by its name; waits for a name that is not known yet.

    A host often takes its own name for a loopback address (Debian's /etc/hosts, containers): then it is the address
    with the way to others. Raises PlaitError.
    """
    addresses = _addresses_of(name)
    if _is_address(name) or not all(ip_address(one).is_loopback for one in addresses):
        own = local_addresses()
        return next((one for one in addresses if one in own), addresses[0])
    address = _address_with_a_way_out(name)
    screen.print(
        f"address  {address}: {name} means {addresses[0]} here, by which no other host reaches it, so this is the "
        f"one with the way to others"
    )
    return address


def _addresses_of(name: str) -> list[str]:
    deadline = time.monotonic() + NAME_AT_LATEST_S
    while True:
        try:
            return [str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        except OSError as error:
            if time.monotonic() > deadline:
                raise PlaitError(f"{name} is a name that no host here has ({error}); check the cluster's DNS") from None
        time.sleep(_LOOK_EVERY_S)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _address_with_a_way_out(name: str) -> str:
    """The only address beside loopback, else the one from which packets leave for elsewhere; none is sent."""
    outside = [text for text in local_addresses() if not ip_address(text).is_loopback]
    if len(outside) == 1:
        return outside[0]
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # for documents alone
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((elsewhere, 9))
            return str(asking.getsockname()[0])
    raise PlaitError(
        f"{name} means a loopback address here, and this host has {' and '.join(outside) or 'no other'}; have the name "
        "mean the address by which the other nodes reach it (/etc/hosts, NodeAddr in slurm.conf)"
    )
