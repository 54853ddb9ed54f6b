"""What the ranks' own traffic is told of the network by variables, each with the fact that is its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.launch.network.facts import NetworkFacts
from plait.units import format_bytes

FAST_MEGABITS = 100_000
"""From here on one stream of TCP does not fill the link; NCCL's manual names four threads of four for it."""
LOCKED_ENOUGH = 1 << 30
SHARED_MEMORY_ENOUGH = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkVariable:
    """A variable that ranks are started with, unless the person has set it."""

    name: str
    value: str
    reason: str


def network_variables(facts: NetworkFacts, *, spans_hosts: bool) -> tuple[NetworkVariable, ...]:
    """The variables for the interface that owns a host's address in the run."""
    gloo = NetworkVariable(
        name="GLOO_SOCKET_IFNAME",
        value=facts.interface,
        reason="processors' messages take the interface that the hosts met on; gloo would take that of the host's "
        "name, which in a container is often none",
    )
    if not spans_hosts:  # within one machine NCCL needs no network
        return (gloo,)
    nccl = NetworkVariable(
        name="NCCL_SOCKET_IFNAME",
        value=f"={facts.interface}",
        reason='GPUs meet there, too; NCCL would take the first that it finds, and "=" is this very name, no beginning',
    )
    return (gloo, nccl, *_of_family(facts), *_of_speed(facts))


def _of_family(facts: NetworkFacts) -> tuple[NetworkVariable, ...]:
    if not facts.is_ipv6:
        return ()
    reason = "the hosts met by IPv6; NCCL would take IPv4 where the interface has both"
    return (NetworkVariable(name="NCCL_SOCKET_FAMILY", value="AF_INET6", reason=reason),)


def _of_speed(facts: NetworkFacts) -> tuple[NetworkVariable, ...]:
    """Several streams where one does not fill the link, unless RDMA carries what is large."""
    if facts.rdma or facts.megabits is None or facts.megabits < FAST_MEGABITS:
        return ()
    reason = f"the link carries {facts.megabits // 1000} Gb/s, and one stream of TCP does not fill it; NCCL has one"
    return (
        NetworkVariable(name="NCCL_SOCKET_NTHREADS", value="4", reason=reason),
        NetworkVariable(name="NCCL_NSOCKS_PERTHREAD", value="4", reason="as many streams in each of these threads"),
    )


def network_lines(
    facts: NetworkFacts, environment: Mapping[str, str], *, address: str, lost_after_s: float
) -> list[str]:
    """What a person is told: the interface, each variable with its reason or that their own value stays, RDMA, what may
    be in its way, and when a host counts as lost."""
    size = f", packets of {facts.mtu:,} bytes at most (MTU)" if facts.mtu else ""
    speed = f", {facts.megabits / 1000:g} Gb/s" if facts.megabits else ""
    points = []
    for one in network_variables(facts, spans_hosts=True):
        if environment.get(one.name, one.value) == one.value:
            points.append(f"{one.name}={one.value}: {one.reason}")
        else:
            points.append(f"{one.name}={environment[one.name]} stays as you set it")
    points += _gpu_points(facts) if facts.has_gpus else []
    points.append(
        f"a host that says nothing for {lost_after_s:g} s is lost, and one whose connection breaks at once; no "
        f"variable is needed for that"
    )
    return [f"network  {address} on {facts.interface}{size}{speed}", *(f"         · {point}" for point in points)]


def _gpu_points(facts: NetworkFacts) -> list[str]:
    points = []
    if facts.rdma:
        ports = ", ".join(f"{port.name} ({port.link}, {port.rate})" for port in facts.rdma)
        points.append(f"GPUs use RDMA by {ports}; NCCL finds it itself")
    if facts.rdma and facts.lockable_bytes is not None and facts.lockable_bytes < LOCKED_ENOUGH:
        points.append(
            f"but this process may keep {format_bytes(facts.lockable_bytes)} of memory in place, which is too little "
            f"for RDMA: ulimit -l unlimited, LimitMEMLOCK=infinity of a service, or in a pod the capability IPC_LOCK"
        )
    if facts.shared_memory_bytes is not None and facts.shared_memory_bytes < SHARED_MEMORY_ENOUGH:
        points.append(
            f"/dev/shm has {format_bytes(facts.shared_memory_bytes)}, by which the GPUs of a machine may talk: give a "
            "container more, for example --shm-size=8g"
        )
    return points
