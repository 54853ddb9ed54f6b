"""What a lab is made of, as commands of `ip` and `tc`: namespaces, cables, a switch, limits. Pure: hosts.py runs them.

host 0: eth0 ══ port0 ┐
host 1: eth0 ══ port1 ┼ bridge "switch", in a namespace of its own; nothing of it is seen outside
host 2: eth0 ══ port2 ┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PREFIX = "plait-lab-"
"""Of all that a lab makes; behind it stand the process that made it and when that process began."""

Rate = float | Literal["unshaped"]
"""Bits a second."""

Command = tuple[str, ...]

QUEUE_S = 0.010
LEAST_QUEUE_BYTES = 128 * 1024
BURST_S = 0.002
LEAST_BURST_BYTES = 16 * 1024
WHOLE_PACKET_BYTES = 65536
"""What a system hands to a network card in one piece, at most."""
HEADERS = 0.1
"""More than the share that headers of frames have, which count against the burst as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One pretended machine."""

    index: int
    namespace: str
    address: str
    cores: float
    """Processor time that it may take, in cores."""


def hosts_of(lab: str, cores: Sequence[float]) -> tuple[Host, ...]:
    """The hosts of a lab by their quotas."""
    return tuple(
        Host(index=index, namespace=f"{lab}-host{index}", address=f"10.77.0.{index + 1}", cores=share)
        for index, share in enumerate(cores)
    )


def switch_of(lab: str) -> str:
    """The namespace of the bridge."""
    return f"{lab}-switch"


def building(lab: str, hosts: Sequence[Host]) -> list[Command]:
    """From nothing to hosts that reach each other. Cables are born inside the namespaces."""
    switch = switch_of(lab)
    commands: list[Command] = [
        *(("ip", "netns", "add", name) for name in [switch, *(host.namespace for host in hosts)]),
        ("ip", "-n", switch, "link", "add", "switch", "type", "bridge", "forward_delay", "0"),
        ("ip", "-n", switch, "link", "set", "switch", "up"),
    ]
    for host in hosts:
        port, inside = f"port{host.index}", ("ip", "-n", host.namespace)
        commands += [
            ("ip", "link", "add", "eth0", "netns", host.namespace, "type", "veth", "peer", port, "netns", switch),
            ("ip", "-n", switch, "link", "set", port, "master", "switch", "up"),
            (*inside, "link", "set", "lo", "up"),
            (*inside, "address", "add", f"{host.address}/24", "dev", "eth0"),
            (*inside, "link", "set", "eth0", "up"),
        ]
    return commands


def limiting(lab: str, hosts: Sequence[Host], rate: Rate) -> list[Command]:
    """Each cable limited both ways: what the switch sends to a host, and what the host sends to the switch."""
    if rate == "unshaped":
        return []
    burst = max(LEAST_BURST_BYTES, round(rate / 8 * BURST_S))
    ends = [end for host in hosts for end in ((switch_of(lab), f"port{host.index}"), (host.namespace, "eth0"))]
    commands: list[Command] = [
        ("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *_bucket(rate, burst))
        for namespace, device in ends
    ]
    # A network card cuts packets by itself. Here what is larger than a burst would be cut by the processor, which
    # belongs to the hosts, so that hosts must not make such packets.
    largest = min(WHOLE_PACKET_BYTES, int(burst * (1 - HEADERS)))
    commands += [("ip", "-n", host.namespace, "link", "set", "eth0", "gso_max_size", str(largest)) for host in hosts]
    return commands


def parting(lab: str, hosts: Sequence[Host], rate: float) -> list[Command]:
    """Moves these hosts into another room: to a switch of their own, with a road of this rate to the others' one."""
    inside = ("ip", "-n", switch_of(lab))
    commands: list[Command] = [
        (*inside, "link", "add", "annex", "type", "bridge", "forward_delay", "0"),
        (*inside, "link", "set", "annex", "up"),
        *((*inside, "link", "set", f"port{host.index}", "master", "annex") for host in hosts),
        (*inside, "link", "add", "road0", "type", "veth", "peer", "road1"),
    ]
    bucket = _bucket(rate, 2 * WHOLE_PACKET_BYTES)
    for end, switch in (("road0", "switch"), ("road1", "annex")):
        commands += [
            (*inside, "link", "set", end, "master", switch, "up"),
            ("tc", "-n", switch_of(lab), "qdisc", "replace", "dev", end, "root", *bucket),
        ]
    return commands


def _bucket(rate: float, burst: int) -> Command:
    """A token bucket: short bursts as a network card lets out, and the queue of a modest switch."""
    limit = burst + max(LEAST_QUEUE_BYTES, round(rate / 8 * QUEUE_S))
    return ("tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst}b", "limit", f"{limit}b")
