"""What a run knows of its machines before it is planned: this machine, or all hosts that joined and the links
between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from plait.machines.cluster import Cluster, cluster_of_hosts
from plait.machines.machine import Machine
from plait.machines.measured import LEAST_UNDISTURBED_SHARE, Measurements
from plait.machines.requested_workers import PeakNeed
from plait.planner.derive.resources import FixedWorkers, Probe, ProbeNeed
from plait.planner.heterogeneous.host_permutations import cluster_of_nodes
from plait.planner.resolve.named_workers import named_workers
from plait.planner.step_time.measured_network import slowest_measured_link
from plait.probing.measurements import (
    ProbeFreshness,
    ProbeWorkers,
    load_measurements,
    mark_checked,
    measure_or_load,
    measurements_still_hold,
    pool_measurements,
    was_checked_recently,
)
from plait.probing.measuring import MachineSurvey, survey_machine
from plait.probing.request import MAX_CPU_MICROBATCH_TOKENS, ProbeRequest, model_probe_request
from plait.recipe.schema import RunConfig
from plait.screen.screen import ShowProgress, ignore_progress
from plait.units import format_si
from plait.workers import HostWorkers

HostMachine = tuple[Machine, float | None, int]
"""A host's machine, the rate of its processor (None if unknown), and its number of workers."""


def survey_machines(
    config: RunConfig,
    workers: HostWorkers,
    log: Callable[[str], None],
    fresh: ProbeFreshness,
    show: ShowProgress = ignore_progress,
    before: Sequence[HostMachine] = (),
    peak: PeakNeed = "measured",
) -> MachineSurvey:
    """This machine; over several hosts host 0's, with a function that probes all of them once the model is known, and
    tells `show` how far that is.

    `fresh` "again" probes them in any case; "kept" takes the stored measurements of an earlier probe as long as a short
    check confirms them, or those of the hosts `before`, where these are some of them.
    """
    hosts = workers.host_machines(peak)
    if not hosts:
        return survey_machine(workers, named_workers(config), peak)
    machines = tuple(machine for machine, _, _ in hosts)
    rates = [flops for _, flops, _ in hosts if flops is not None]
    return MachineSurvey(
        machine=machines[0],
        peak_flops=sum(rates) if len(rates) == len(hosts) else None,
        others=machines[1:],
        probe=_make_probe(workers, (hosts, before), log, fresh, show) if len(hosts) > 1 else None,
    )


def _make_probe(
    workers: HostWorkers,
    hosts_and_before: tuple[Sequence[HostMachine], Sequence[HostMachine]],
    log: Callable[[str], None],
    fresh: ProbeFreshness,
    show: ShowProgress,
) -> Probe:
    hosts, before = hosts_and_before

    def look(need: ProbeNeed) -> Cluster:
        cluster = _cluster_of_some(workers, hosts, before, need) if before and fresh == "kept" else None
        if cluster is not None:
            log("probe    measured before, together with the hosts that are gone")
            return cluster
        cluster = probe_cluster(workers, hosts, need, fresh=fresh, show=show)
        assert cluster.measured is not None
        for sentence in cluster.measured.complaints:
            log(f"probe    {sentence}")
        for host in cluster.measured.devices:
            if host.granted < LEAST_UNDISTURBED_SHARE:
                others = f"other programs had {1 - host.granted:.0%} of the cores of {host.host} while it was measured"
                log(f"probe    {others}; the plan counts on all of them: close those programs and give --replan")
        if noise := cluster.measured.noise_warning:
            log(f"probe    {noise}; close them and give --replan")
        rate, latency_s = cluster.between.bytes_per_s * 8, cluster.between.latency_s
        log(
            f"probe    {format_si(rate, 'bit/s')} between the hosts, {1e6 * latency_s:.0f} µs for a short message "
            f"(measured {cluster.measured.date})"
        )
        return cluster

    return look


def _cluster_of_some(
    workers: HostWorkers, hosts: Sequence[HostMachine], before: Sequence[HostMachine], need: ProbeNeed
) -> Cluster | None:
    """The hosts as they were measured together with others; None where they were not."""
    places = places_in(hosts, before)
    if not places:
        return None
    rates = {place: rate for place, (_, rate, _) in zip(places, hosts, strict=True)}
    before = [(machine, rates.get(at, rate), count) for at, (machine, rate, count) in enumerate(before)]
    machines = [machine for machine, _, _ in before]
    threads = _fixed(workers).threads
    extent = ProbeWorkers(workers=sum(count for _, _, count in before), threads=threads)
    known = load_measurements(machines, _request(machines, threads, need), extent, workers.working_folder)
    if known is None:
        return None
    measured = pool_measurements(known)
    whole = replace(cluster_of_hosts(before, slowest_measured_link(measured, "between")), measured=measured)
    return cluster_of_nodes(whole, places)


def places_in(hosts: Sequence[HostMachine], before: Sequence[HostMachine]) -> list[int]:
    """Where each of `hosts` stands in `before`, the first one first there, too; empty where one does not."""
    free, found = list(range(len(before))), list[int]()
    for machine, _, workers in hosts:
        alike = [at for at in free if (before[at][0], before[at][2]) == (machine, workers)]
        if not alike:
            return []
        found.append(alike[0])
        free.remove(alike[0])
    return found if found[0] == 0 else []


def probe_cluster(
    workers: HostWorkers,
    hosts: Sequence[HostMachine],
    need: ProbeNeed,
    *,
    fresh: ProbeFreshness,
    show: ShowProgress = ignore_progress,
) -> Cluster:
    """Several hosts as a cluster, with a probe's measurements for a model.

    With "kept", an earlier probe's are used if machines and software are the same and its links are as fast as then.
    """
    measured = pool_measurements(_probe_or_load(workers, [machine for machine, _, _ in hosts], need, fresh, show))
    return replace(cluster_of_hosts(hosts, slowest_measured_link(measured, "between")), measured=measured)


def _probe_or_load(
    workers: HostWorkers, machines: list[Machine], need: ProbeNeed, fresh: ProbeFreshness, show: ShowProgress
) -> Measurements:
    given = _fixed(workers)
    requested = _request(machines, given.threads, need)
    extent, addresses = ProbeWorkers(workers=given.workers, threads=given.threads), workers.addresses()
    working = workers.working_folder
    known = load_measurements(machines, requested, extent, working) if fresh == "kept" else None
    if known is not None and was_checked_recently(machines, requested, extent, addresses, working):
        return known
    if known is not None:
        show(0, 0, "comparing the hosts with an earlier probe")
    if known is None or not measurements_still_hold(workers, known, requested, extent):
        known = measure_or_load(workers, machines, requested, extent, fresh="again", show=show)
    mark_checked(machines, requested, extent, addresses, working)
    return known


def _fixed(workers: HostWorkers) -> FixedWorkers:
    given = workers.fixed_workers
    assert given is not None, "hosts that joined bring their workers"
    return given


def _request(machines: Sequence[Machine], threads: int, need: ProbeNeed) -> ProbeRequest:
    device, sequence = machines[0].device, need.shape.sequence
    most = max(1, MAX_CPU_MICROBATCH_TOKENS // sequence) if device == "cpu" else need.batch_sequences
    requested = model_probe_request(
        need.shape,
        sequence=sequence,
        sequences=min(most, need.batch_sequences),
        device=device,
        precision="bf16" if need.precision == "bf16" else "float32",
        threads=threads,
    )
    return replace(
        requested,
        matmul_backend=need.matmul_backend,
        host_backends=need.host_backends,
        compile=need.compile,
        gpus=machines[0].gpus,
    )
