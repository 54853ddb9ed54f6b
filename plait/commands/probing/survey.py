"""What a run finds before it is planned: this machine, or all hosts that joined and the roads between them."""

from __future__ import annotations

from dataclasses import replace

from plait.cluster.cluster import Cluster, cluster_of_hosts
from plait.cluster.measured import Measurements
from plait.cluster.pooled import pool_measurements
from plait.cluster.probe.request import CPU_TOKENS, probe_request
from plait.cluster.topology import Machine, usable_cores
from plait.commands.planning.make_plan import Log, MachineSurvey, look_around
from plait.commands.planning.workers import HostWorkers
from plait.commands.probing.measurements import (
    Fresh,
    WorkerExtent,
    checked_lately,
    kept_measurement,
    measure_or_load,
    note_checked,
)
from plait.commands.probing.revalidate import still_holds
from plait.commands.probing.table import QUIET
from plait.planner.derive.resources import Probe, ProbeNeed
from plait.planner.step_time.measured_network import slowest_measured_link
from plait.units import format_si

HostMachine = tuple[Machine, float | None, int]
"""A host's machine, the rate of its processor, and its workers."""


def survey_machines(workers: HostWorkers, say: Log, fresh: Fresh) -> MachineSurvey:
    """This machine; over several hosts host 0's, with what looks at all of them once the model is known.

    That probes them "again", or takes what was "kept" of an earlier probe as long as a short look finds it true.
    """
    hosts = workers.hosts()
    if not hosts:
        return look_around(workers, usable_cores())
    machines = tuple(machine for machine, _, _ in hosts)
    rates = [flops for _, flops, _ in hosts if flops is not None]
    return MachineSurvey(
        machine=machines[0],
        peak_flops=sum(rates) if len(rates) == len(hosts) else None,
        others=machines[1:],
        probe=_look(workers, hosts, say, fresh),
    )


def _look(workers: HostWorkers, hosts: tuple[HostMachine, ...], say: Log, fresh: Fresh) -> Probe:
    def look(need: ProbeNeed) -> Cluster:
        cluster = probed_cluster(workers, hosts, need, fresh=fresh)
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


def probed_cluster(workers: HostWorkers, hosts: tuple[HostMachine, ...], need: ProbeNeed, *, fresh: Fresh) -> Cluster:
    """Several hosts as a cluster, with what a probe of all of them measures for a model.

    What was "kept" of an earlier one is taken where machines and software are the same and the roads still are.
    """
    measured = pool_measurements(_probed(workers, [machine for machine, _, _ in hosts], need, fresh))
    return replace(cluster_of_hosts(hosts, slowest_measured_link(measured, "between")), measured=measured)


def _probed(workers: HostWorkers, machines: list[Machine], need: ProbeNeed, fresh: Fresh) -> Measurements:
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
    extent, addresses = WorkerExtent(workers=given.workers, threads=given.threads), workers.addresses()
    known = kept_measurement(machines, asked, extent) if fresh == "kept" else None
    if known is not None and checked_lately(machines, asked, extent, addresses):
        return known
    if known is None or not still_holds(workers, known, asked, extent):
        known = measure_or_load(workers, machines, asked, extent, fresh="again")
    note_checked(machines, asked, extent, addresses)
    return known
