"""What a run finds before it is planned: this machine, or all hosts that joined and the roads between them."""

from __future__ import annotations

from dataclasses import replace

from plait.cluster.cluster import Cluster, cluster_of_hosts
from plait.cluster.measured import Measured
from plait.cluster.pooled import pooled
from plait.cluster.probe.request import CPU_TOKENS, probe_request
from plait.cluster.topology import Machine, usable_cores
from plait.commands.planning.make_plan import Say, Site, look_around
from plait.commands.planning.workers import PlacedCrew
from plait.commands.probing.measurements import Extent, Fresh, kept_measurement, measured_by, note_seen, seen_lately
from plait.commands.probing.revalidate import still_holds
from plait.commands.probing.table import QUIET
from plait.planner.derive.resources import Need, Probe
from plait.planner.step_time.measured_network import measured_link
from plait.units import format_si

Host = tuple[Machine, float | None, int]
"""A host's machine, the rate of its processor, and its workers."""


def survey(workers: PlacedCrew, say: Say, fresh: Fresh) -> Site:
    """This machine; over several hosts host 0's, with what looks at all of them once the model is known.

    That probes them "again", or takes what was "kept" of an earlier probe as long as a short look finds it true.
    """
    hosts = workers.hosts()
    if not hosts:
        return look_around(workers, usable_cores())
    machines = tuple(machine for machine, _, _ in hosts)
    rates = [flops for _, flops, _ in hosts if flops is not None]
    return Site(
        machine=machines[0],
        peak_flops=sum(rates) if len(rates) == len(hosts) else None,
        others=machines[1:],
        look=_look(workers, hosts, say, fresh),
    )


def _look(workers: PlacedCrew, hosts: tuple[Host, ...], say: Say, fresh: Fresh) -> Probe:
    def look(need: Need) -> Cluster:
        cluster = described(workers, hosts, need, fresh=fresh)
        assert cluster.measured is not None
        for sentence in cluster.measured.complaints:
            say(f"probe    {sentence}")
        for host in cluster.measured.devices:
            if host.granted < QUIET:
                others = f"other programs had {1 - host.granted:.0%} of the cores of {host.host} while it was measured"
                say(f"probe    {others}; the plan counts on all of them: close those programs and give --replan")
        if noise := cluster.measured.noise:
            say(f"probe    {noise}; close them and give --replan")
        rate, latency_s = cluster.between.bytes_per_s * 8, cluster.between.latency_s
        say(
            f"probe    {format_si(rate, 'bit/s')} between the hosts, {1e6 * latency_s:.0f} µs for a short message "
            f"(measured {cluster.measured.date})"
        )
        return cluster

    return look


def described(workers: PlacedCrew, hosts: tuple[Host, ...], need: Need, *, fresh: Fresh) -> Cluster:
    """Several hosts as a cluster, with what a probe of all of them measures for a model.

    What was "kept" of an earlier one is taken where machines and software are the same and the roads still are.
    """
    measured = pooled(_probed(workers, [machine for machine, _, _ in hosts], need, fresh))
    return replace(cluster_of_hosts(hosts, measured_link(measured, "between")), measured=measured)


def _probed(workers: PlacedCrew, machines: list[Machine], need: Need, fresh: Fresh) -> Measured:
    given, sequence = workers.fixed_workers, need.shape.sequence
    assert given is not None
    device = machines[0].device
    most = max(1, CPU_TOKENS // sequence) if device == "cpu" else need.batch_sequences
    asked = probe_request(
        need.shape,
        sequence=sequence,
        sequences=min(most, need.batch_sequences),
        device=device,
        precision="bf16" if need.precision == "bf16" else "float32",
        threads=given.threads,
    )
    extent, addresses = Extent(workers=given.workers, threads=given.threads), workers.addresses()
    known = kept_measurement(machines, asked, extent) if fresh == "kept" else None
    if known is not None and seen_lately(machines, asked, extent, addresses):
        return known
    if known is None or not still_holds(workers, known, asked, extent):
        known = measured_by(workers, machines, asked, extent, fresh="again")
    note_seen(machines, asked, extent, addresses)
    return known
