"""What the ranks' own traffic is told of the network by variables, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkVariable:
    """A variable that ranks are started with, unless the person has set it."""

    name: str
    value: str
    reason: str


def network_variables(interface: str, *, spans_hosts: bool) -> tuple[NetworkVariable, ...]:
    """The variables for the interface that owns a host's address in the run."""
    gloo = NetworkVariable(
        name="GLOO_SOCKET_IFNAME",
        value=interface,
        reason="processors' messages take the interface that the hosts met on; gloo would take that of the host's name",
    )
    if not spans_hosts:  # within one machine NCCL needs no network
        return (gloo,)
    nccl = NetworkVariable(
        name="NCCL_SOCKET_IFNAME",
        value=f"={interface}",
        reason='GPUs meet there, too; NCCL would take the first that it finds, and "=" is this very name, no beginning',
    )
    return (gloo, nccl)


def network_lines(
    variables: Sequence[NetworkVariable], environment: Mapping[str, str], *, address: str, mtu: int | None
) -> list[str]:
    """What a person is told: the interface, and each variable with its reason, or that their own value stays."""
    interface = variables[0].value
    size = f", packets of {mtu:,} bytes at most (MTU)" if mtu else ""
    lines = [f"network  {address} on {interface}{size}"]
    for one in variables:
        if environment.get(one.name, one.value) == one.value:
            lines.append(f"         · {one.name}={one.value}: {one.reason}")
        else:
            lines.append(f"         · {one.name}={environment[one.name]} stays as you set it")
    return lines
