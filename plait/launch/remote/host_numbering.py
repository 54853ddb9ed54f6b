"""Gives the hosts of a run that continues the numbers that they had before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ipaddress import ip_address

from plait.machines.machine import strip_name_number

HostIdentity = tuple[str, str]
"""What identifies a host: its mark, empty where it is unknown, and its name."""


def by_address(address: str) -> tuple[int, bytes, str]:
    """Sort key that gives hosts the same order whoever joins first, as a probe's results are stored by host number."""
    try:
        packed = ip_address(address.partition("%")[0]).packed
    except ValueError:
        return 0, b"", address
    return len(packed), packed, address


def host_numbers(arrived: Sequence[HostIdentity], order: Sequence[HostIdentity]) -> list[int]:
    """The number that each arrived host had in `order`, each given once; newcomers take the numbers of missing hosts,
    and the count of all numbers where none is left.

    Hosts are matched by their marks first. Names say less: machines of one image get numbered names ("ubuntu (2)") in
    `order`.
    """
    free, places = set(range(1, len(order))), [len(order)] * len(arrived)

    def give(alike: Callable[[HostIdentity, HostIdentity], bool]) -> None:
        for at, host in enumerate(arrived):
            known = [place for place in sorted(free) if places[at] == len(order) and alike(host, order[place])]
            if known:
                places[at] = known[0]
                free.remove(known[0])

    give(lambda host, one: host[0] == one[0] != "")
    give(lambda host, one: strip_name_number(one[1]) == host[1])
    give(lambda host, one: True)
    return places
