"""What a run knows of its machines before it is planned: this machine, or all hosts that joined and the links
between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from plait.errors import OutOfTime
from plait.launch.values.job import Job
from plait.machines.catalog import link_at_rate
from plait.machines.cluster import Cluster, cluster_of_hosts
from plait.machines.machine import Machine, usable_cores
from plait.machines.measured import LEAST_UNDISTURBED_SHARE, Measurements
from plait.machines.requested_workers import ANY_WORKERS, PEAK_S, PeakNeed, RequestedWorkers, SurveyRequest
from plait.planner.derive.model_size import budget_of
from plait.planner.derive.resources import FixedWorkers, Probe, ProbeNeed, Resources, on_paper
from plait.planner.heterogeneous.host_permutations import cluster_of_nodes
from plait.planner.resolve.named import named_workers
from plait.planner.step_time.measured_network import slowest_measured_link
from plait.probing.calibration_store import calibration_key, load_calibration, read_expert_load
from plait.probing.measurements import ProbeFreshness, StoredProbe, pool_measurements
from plait.probing.measuring_time import UNLIMITED, MeasuringTime, Timing, with_skip_hint
from plait.probing.request import brief_request, recipe_probe_request
from plait.recipe.schema import RunConfig
from plait.screen.screen import ShowProgress, ignore_progress
from plait.units import format_duration, format_si
from plait.workers import MEASURE_ENTRY, HostWorkers, WorkerPool, ask_rank_0
from plait.working_folder import WorkingFolder

ASSUMED_GBIT = 1.0
"""Between hosts whose links there was no time to measure: the slowest that is usual."""
LEAST_WHOLE_S = 60.0
"""Time for measuring from which a whole probe is tried."""
WHOLE_SHARE, BRIEF_SHARE = 0.5, 0.6
"""Shares of what is left of the time for measuring that a whole probe may take, and then a brief one."""
HostMachine = tuple[Machine, float | None, int]
"""A host's machine, the rate of its processor (None if unknown), and its number of workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSurvey:
    """The machine that a run finds, and the arithmetic peak that MFU is a share of."""

    machine: Machine
    peak_flops: float | None
    peak_doubt: str = ""
    """A sentence on why the peak is doubtful; empty if it is not."""
    others: tuple[Machine, ...] = ()
    """The machines of the run's other hosts."""
    probe: Probe | None = None
    """Measures all hosts and the links between them."""


def survey_machine(
    workers: WorkerPool,
    requested: RequestedWorkers = ANY_WORKERS,
    peak: PeakNeed = "measured",
    peak_s: float = PEAK_S,
) -> MachineSurvey:
    """Describe this machine with the requested devices and measure its arithmetic peak, in a worker that uses all
    cores."""
    argument = SurveyRequest(requested=requested, peak=peak, peak_s=peak_s).to_json()
    job = Job(entry=MEASURE_ENTRY, argument=argument, world_size=1, threads=usable_cores(), at_stop="abandon")
    found = ask_rank_0(workers, job, "machine")
    machine = Machine.from_fingerprint(found["fingerprint"])
    return MachineSurvey(machine=machine, peak_flops=found["peak_flops"], peak_doubt=found["peak_doubt"])


def resources_of(site: MachineSurvey, workers: WorkerPool) -> Resources:
    """The surveyed machines and their workers as the planner's Resources."""
    machines, working = (site.machine, *site.others), workers.working_folder
    return Resources(
        machine=site.machine,
        peak_flops=site.peak_flops,
        others=site.others,
        peak_doubt=site.peak_doubt,
        fixed_workers=workers.fixed_workers,
        probe=site.probe,
        load_calibration=lambda precision, basis: load_calibration(
            calibration_key(machines, precision, basis), working
        ),
        load_expert_load=lambda mixture: read_expert_load(mixture, working),
    )


def resources_on_paper(cluster: Cluster, working: WorkingFolder) -> Resources:
    """A cluster that need not be there; of what runs here measured, what holds on any machine."""
    return on_paper(cluster, load_expert_load=lambda mixture: read_expert_load(mixture, working))


def survey_machines(
    config: RunConfig,
    workers: HostWorkers,
    log: Callable[[str], None],
    fresh: ProbeFreshness,
    show: ShowProgress = ignore_progress,
    before: Sequence[HostMachine] = (),
    peak: PeakNeed = "measured",
    timing: Timing = "bounded",
) -> MachineSurvey:
    """This machine; over several hosts host 0's, with a function that probes all of them once the model is known, and
    tells `show` how far that is.

    `fresh` "again" probes them in any case; "kept" takes the stored measurements of an earlier probe as long as a short
    check confirms them, or those of the hosts `before`, where these are some of them.
    """
    hosts = workers.host_machines(peak)
    if not hosts:
        limit = MeasuringTime.of(budget_of(config), timing)
        return survey_machine(workers, named_workers(config), peak, min(PEAK_S, limit.left_s / 4))
    machines = tuple(machine for machine, _, _ in hosts)
    rates = [flops for _, flops, _ in hosts if flops is not None]
    return MachineSurvey(
        machine=machines[0],
        peak_flops=sum(rates) if len(rates) == len(hosts) else None,
        others=machines[1:],
        probe=_make_probe(config, workers, hosts, before, log, fresh, show, timing) if len(hosts) > 1 else None,
    )


def _make_probe(
    config: RunConfig,
    workers: HostWorkers,
    hosts: Sequence[HostMachine],
    before: Sequence[HostMachine],
    log: Callable[[str], None],
    fresh: ProbeFreshness,
    show: ShowProgress,
    timing: Timing,
) -> Probe:
    @cache
    def time_for_all() -> MeasuringTime:
        return MeasuringTime.of(budget_of(config), timing)  # a second draft is measured within what is left

    def look(need: ProbeNeed) -> Cluster:
        cluster = _cluster_of_some(workers, hosts, before, need) if before and fresh == "kept" else None
        if cluster is not None:
            log("probe    measured before, together with the hosts that are gone")
            return cluster
        limit = time_for_all()
        try:
            cluster = probe_cluster(workers, hosts, need, fresh=fresh, show=with_skip_hint(show), limit=limit)
        except OutOfTime:
            why = f"did not end within {format_duration(limit.limit_s)}" if limit.limit_s else "skipped (--no-timing)"
            log(f"probe    {why}: the plan assumes {ASSUMED_GBIT:g} Gbit/s between the hosts (plait probe measures it)")
            return cluster_of_hosts(hosts, link_at_rate(ASSUMED_GBIT, "machine"))
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
    extent = FixedWorkers(workers=sum(count for _, _, count in before), threads=_fixed(workers).threads)
    known = _stored_probe(workers, machines, extent, need).load()
    if known is None:
        return None
    measured = pool_measurements(known)
    whole = replace(cluster_of_hosts(before, slowest_measured_link(measured, "between")), measured=measured)
    return cluster_of_nodes(whole, places)


def places_in(hosts: Sequence[HostMachine], before: Sequence[HostMachine]) -> list[int]:
    """The position of each of `hosts` in `before`, if the first one is first there, too; empty if one is missing."""
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
    limit: MeasuringTime = UNLIMITED,
) -> Cluster:
    """Several hosts as a cluster, with a probe's measurements for a model.

    With "kept", an earlier probe's are used if machines and software are the same and its links are as fast as then.
    """
    measured = pool_measurements(
        _probe_or_load(workers, [machine for machine, _, _ in hosts], need, fresh, show, limit)
    )
    return replace(cluster_of_hosts(hosts, slowest_measured_link(measured, "between")), measured=measured)


def _probe_or_load(
    workers: HostWorkers,
    machines: list[Machine],
    need: ProbeNeed,
    fresh: ProbeFreshness,
    show: ShowProgress,
    limit: MeasuringTime,
) -> Measurements:
    """An earlier probe's measurements, or new ones: brief ones where the time is too short for whole ones."""
    stored, addresses = _stored_probe(workers, machines, _fixed(workers), need), workers.addresses()
    brief = replace(stored, request=brief_request(stored.request))
    for kept in (stored, brief) if fresh == "kept" else ():
        if (known := kept.load()) is None:
            continue
        if kept.was_checked_recently(addresses):
            return known
        show(0, 0, "comparing the hosts with an earlier probe")
        try:
            holds = kept.still_holds(workers, known, limit.part(BRIEF_SHARE))
        except OutOfTime:  # unchecked, but better than an unmeasured network
            return known
        if holds:
            kept.mark_checked(addresses)
            return known
    if limit.limit_s >= LEAST_WHOLE_S:
        with suppress(OutOfTime):
            return _measured(stored, workers, show, limit.part(WHOLE_SHARE))
    return _measured(brief, workers, show, limit.part(BRIEF_SHARE))


def _measured(stored: StoredProbe, workers: HostWorkers, show: ShowProgress, limit: MeasuringTime) -> Measurements:
    found = stored.measure(workers, show, limit)
    stored.mark_checked(workers.addresses())
    return found


def _fixed(workers: HostWorkers) -> FixedWorkers:
    given = workers.fixed_workers
    assert given is not None, "hosts that joined bring their workers"
    return given


def _stored_probe(
    workers: HostWorkers, machines: Sequence[Machine], extent: FixedWorkers, need: ProbeNeed
) -> StoredProbe:
    request = recipe_probe_request(need, machines[0], extent.threads)
    return StoredProbe(machines=machines, request=request, workers=extent, working=workers.working_folder)
