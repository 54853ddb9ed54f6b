"""What a run finds before it is planned: this machine, or all hosts that joined and the roads between them."""

from __future__ import annotations

from plait.cluster.catalog import network
from plait.cluster.cluster import Cluster, cluster_of_hosts
from plait.cluster.measured import Measured
from plait.cluster.probe_request import CPU_TOKENS, request_of
from plait.cluster.topology import Machine, usable_cores
from plait.plan.clocked import measured_link
from plait.plan.grounds import Look, Need
from plait.run.crew import PlacedCrew
from plait.run.planning import Say, Site, look_around
from plait.run.probe import Extent, measured_by
from plait.units import format_count

Host = tuple[Machine, float | None, int]
"""A host's machine, the rate of its processor, and its workers."""


def survey(workers: PlacedCrew, say: Say) -> Site:
    """This machine; over several hosts host 0's, with what looks at all of them once the model is known."""
    hosts = workers.hosts()
    if not hosts:
        return look_around(workers, usable_cores())
    machines = tuple(machine for machine, _, _ in hosts)
    rates = [flops for _, flops, _ in hosts if flops is not None]
    return Site(
        machine=machines[0],
        peak_flops=sum(rates) if len(rates) == len(hosts) else None,
        others=machines[1:],
        look=_look(workers, hosts, say),
    )


def _look(workers: PlacedCrew, hosts: tuple[Host, ...], say: Say) -> Look:
    def look(need: Need) -> Cluster:
        measured = _probed(workers, [machine for machine, _, _ in hosts], need)
        for sentence in measured.complaints:
            say(f"probe    {sentence}")
        if not any(link.scope == "between" for link in measured.links):
            return cluster_of_hosts(hosts, network(1, "machine"))
        link = measured_link(measured, "between")
        say(f"probe    between the hosts {format_count(link.bytes_per_s)}B/s, {link.latency_s * 1e6:.0f} µs")
        cluster = cluster_of_hosts(hosts, link)
        return Cluster(name=cluster.name, islands=cluster.islands, between=link, measured=measured)

    return look


def _probed(workers: PlacedCrew, machines: list[Machine], need: Need) -> Measured:
    given, sequence = workers.given, need.shape.sequence
    assert given is not None
    device = machines[0].device
    most = max(1, CPU_TOKENS // sequence) if device == "cpu" else need.batch_sequences
    asked = request_of(
        need.shape,
        sequence=sequence,
        sequences=min(most, need.batch_sequences),
        device=device,
        precision="bf16" if need.precision == "bf16" else "float32",
        threads=given.threads,
    )
    return measured_by(workers, machines, asked, Extent(workers=given.workers, threads=given.threads), fresh="kept")
