"""What a run knows of its machines before it is planned: this machine, or all hosts that joined and the links
between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf

from plait.errors import OutOfTime
from plait.launch.values.job import Job
from plait.machines.catalog import link_at_rate
from plait.machines.cluster import Cluster, cluster_of_hosts
from plait.machines.machine import Machine, usable_cores
from plait.machines.measured import LEAST_UNDISTURBED_SHARE, MeasuredDevice, Measurements
from plait.machines.requested_workers import ANY_WORKERS, PEAK_S, PeakNeed, RequestedWorkers, SurveyRequest
from plait.partition.execution import MatmulBackend
from plait.planner.derive.model_size import budget_of
from plait.planner.derive.resources import FixedWorkers, Probe, ProbeNeed, Resources, on_paper
from plait.planner.heterogeneous.host_permutations import cluster_of_nodes
from plait.planner.resolve.named import named_workers
from plait.planner.step_time.measured_network import slowest_measured_link
from plait.probing.calibration_store import calibration_key, load_calibration, read_expert_load
from plait.probing.measurements import (
    RECHECK_AFTER_S,
    ProbeFreshness,
    StoredProbe,
    pool_measurements,
    with_known_devices,
)
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
class PlannedHosts:
    """Hosts that a run was planned for, in the order in which they were measured, and the address of each."""

    hosts: tuple[HostMachine, ...]
    addresses: tuple[str, ...]
    host_backends: Mapping[str, MatmulBackend] = field(default_factory=dict[str, MatmulBackend])
    """As in the plan's arithmetic."""
    together_until_s: float = inf
    """When one of them was lost or another came, by the clock that never goes back."""


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
    before: Sequence[PlannedHosts] = (),
    peak: PeakNeed = "measured",
    timing: Timing = "bounded",
) -> MachineSurvey:
    """This machine; over several hosts host 0's, with a function that probes all of them once the model is known, and
    tells `show` how far that is.

    `fresh` "again" probes them in any case; "kept" takes the stored measurements of an earlier probe as long as a short
    check confirms them. Of a run that goes on, with the hosts that it had `before`, oldest first, only what is not
    known is measured: nothing where they have just worked together, the links where each was measured.
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
    before: Sequence[PlannedHosts],
    log: Callable[[str], None],
    fresh: ProbeFreshness,
    show: ShowProgress,
    timing: Timing,
) -> Probe:
    @cache
    def time_for_all() -> MeasuringTime:
        return MeasuringTime.of(budget_of(config), timing)  # a second draft is measured within what is left

    def look(need: ProbeNeed) -> Cluster:
        known = before if fresh == "kept" else ()
        if cluster := _cluster_as_before(workers, hosts, known, need):
            log("probe    these hosts were measured together before")
            return cluster
        limit, showing = time_for_all(), with_skip_hint(show)
        try:
            if known:
                cluster = _cluster_by_its_links(config, workers, hosts, known, need, showing, limit)
            else:
                cluster = probe_cluster(workers, hosts, need, fresh=fresh, show=showing, limit=limit)
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


def _cluster_as_before(
    workers: HostWorkers, hosts: Sequence[HostMachine], before: Sequence[PlannedHosts], need: ProbeNeed
) -> Cluster | None:
    """The hosts as they were measured together, perhaps with others; None where they were not. Those that came back
    after a long time do not count: their links may be others by now."""
    now = PlannedHosts(hosts=tuple(hosts), addresses=workers.addresses())
    newest = time.monotonic() - RECHECK_AFTER_S
    if before and places_in(now, before[-1]):
        newest = -inf  # no host came back
    for group in reversed(before):
        places = places_in(now, group) if group.together_until_s > newest else []
        if places and (known := _probe_of(workers, group, need, [machine for machine, _, _ in hosts])):
            rates = {place: rate for place, (_, rate, _) in zip(places, hosts, strict=True)}
            there = [(machine, rates.get(at, rate), count) for at, (machine, rate, count) in enumerate(group.hosts)]
            return cluster_of_nodes(_measured_cluster(there, known), places)
    return None


def _cluster_by_its_links(
    config: RunConfig,
    workers: HostWorkers,
    hosts: Sequence[HostMachine],
    before: Sequence[PlannedHosts],
    need: ProbeNeed,
    show: ShowProgress,
    limit: MeasuringTime,
) -> Cluster:
    """Hosts with the links between them, which a brief probe measures now, because the run waits for it. Where each of
    them was measured at length before, alone or with others, it counts as measured then. Raises OutOfTime at the end
    of the time."""
    first, threads = hosts[0][0], _fixed(workers).threads
    known: list[MeasuredDevice] = []
    for host, address in zip(hosts, workers.addresses(), strict=True):
        found = _measured_with_others(workers, host, address, before, need)
        alone = None if found else _measured_alone(config, workers, host, first, threads, need).load()
        known += alone.devices if alone else [found] if found else []
    stored = _stored_probe(workers, [machine for machine, _, _ in hosts], _fixed(workers), need)
    brief = replace(stored, request=brief_request(stored.request))
    now = _measured(brief, workers, show, limit.part(BRIEF_SHARE))
    whole = with_known_devices(now, known) if len(known) == len(hosts) else None
    if whole is None:
        return _measured_cluster(hosts, now)
    stored.mark_checked(workers.addresses())
    return _measured_cluster(hosts, stored.keep(whole))


def _measured_with_others(
    workers: HostWorkers, host: HostMachine, address: str, before: Sequence[PlannedHosts], need: ProbeNeed
) -> MeasuredDevice | None:
    wanted = _key_of(host, address)
    for group in reversed(before):
        keys = [_key_of(*pair) for pair in zip(group.hosts, group.addresses, strict=True)]
        if wanted in keys and (known := _probe_of(workers, group, need, [host[0]])):
            return known.devices[keys.index(wanted)]
    return None


def measure_ahead(
    config: RunConfig,
    workers: WorkerPool,
    machine: Machine,
    first: Machine,
    threads: int,
    need: ProbeNeed,
    limit: MeasuringTime,
) -> None:
    """Measure a host that waits to join hosts of which `first` is the first one's machine, whose workers have
    `threads` threads: `survey_machines` then need not measure it any more. A machine whose figures are known is not
    measured again. Raises OutOfTime at the end of the time."""
    count = _fixed(workers).workers
    stored = _measured_alone(config, workers, (machine, None, count), first, threads, need)
    if stored.load() is None:
        stored.measure(workers, limit=limit)


def _measured_alone(
    config: RunConfig, workers: WorkerPool, host: HostMachine, first: Machine, threads: int, need: ProbeNeed
) -> StoredProbe:
    """What is measured of a host alone for a run that is led by another one."""
    machine, _, count = host
    library = need.host_backends.get(machine.digest(), need.matmul_backend)
    need = replace(need, matmul_backend=library, host_backends={})
    extent = FixedWorkers(workers=count, threads=named_workers(config).threads_of_each(machine, count))
    request = replace(recipe_probe_request(need, first, threads), gpus=machine.gpus)
    return StoredProbe(machines=[machine], request=request, workers=extent, working=workers.working_folder)


def places_in(hosts: PlannedHosts, before: PlannedHosts) -> list[int]:
    """The position of each of `hosts` in `before`, if the first one is first there, too; empty if one is missing."""
    there = dict(enumerate(map(_key_of, before.hosts, before.addresses)))
    found = list[int]()
    for wanted in map(_key_of, hosts.hosts, hosts.addresses):
        alike = [at for at, key in there.items() if key == wanted]
        if not alike:
            return []
        found.append(alike[0])
        del there[alike[0]]
    return found if found[0] == 0 else []


def _key_of(host: HostMachine, address: str) -> tuple[Machine, int, str]:
    machine, _, workers = host
    return machine, workers, address


def _measured_cluster(hosts: Sequence[HostMachine], known: Measurements) -> Cluster:
    measured = pool_measurements(known)
    return replace(cluster_of_hosts(hosts, slowest_measured_link(measured, "between")), measured=measured)


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
    return _measured_cluster(
        hosts, _probe_or_load(workers, [machine for machine, _, _ in hosts], need, fresh, show, limit)
    )


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


def _fixed(workers: WorkerPool) -> FixedWorkers:
    given = workers.fixed_workers
    assert given is not None, "hosts that joined bring their workers"
    return given


def _probe_of(
    workers: HostWorkers, group: PlannedHosts, need: ProbeNeed, machines: Sequence[Machine]
) -> Measurements | None:
    """What was measured of a group, if it was, and by the library of products that some of its machines take now."""
    if any(need.host_backends.get(one.digest()) != group.host_backends.get(one.digest()) for one in machines):
        return None
    extent = FixedWorkers(workers=sum(count for _, _, count in group.hosts), threads=_fixed(workers).threads)
    need = replace(need, host_backends=group.host_backends)
    return _stored_probe(workers, [machine for machine, _, _ in group.hosts], extent, need).load()


def _stored_probe(
    workers: HostWorkers, machines: Sequence[Machine], extent: FixedWorkers, need: ProbeNeed
) -> StoredProbe:
    request = recipe_probe_request(need, machines[0], extent.threads)
    return StoredProbe(machines=machines, request=request, workers=extent, working=workers.working_folder)
