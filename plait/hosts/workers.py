"""The workers of several hosts, seen from host 0: what machines they are, how many workers each has, and how a job runs
on all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from plait.checked_json import SingleLine, one_line, typed_value
from plait.devices import traits_of
from plait.errors import PlaitError
from plait.hosts.checkpoints import CheckpointCollector
from plait.hosts.connection import HostConnection
from plait.hosts.copies import copied_steps, surviving_copies
from plait.hosts.job_files import FileStager, joined_host_part, own_part, read_job_argument
from plait.hosts.joining import HostsRequest, own_host_info
from plait.hosts.leader import HostPart, Hosts, invited_hosts
from plait.hosts.membership import JoinPolicy, Member
from plait.launch.values.copies import CopiesByStep
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import RANKS_AT_MOST, THREADS_AT_MOST, Job, JobResult, Message
from plait.machines.machine import Machine, make_names_unique, usable_cores
from plait.machines.requested_workers import (
    ANY_WORKERS,
    PeakNeed,
    RequestedWorkers,
    SurveyRequest,
    check_requested_workers,
)
from plait.planner.derive.resources import FixedWorkers
from plait.planner.plan import HostShare, Plan, refreshed_hosts
from plait.planner.plan_file import read_plan, write_plan
from plait.planner.resolve.named import named_degrees, named_workers
from plait.probing.survey import MachineSurvey
from plait.recipe.schema import RunConfig
from plait.run_folder import RunFolder
from plait.screen.screen import Screen
from plait.units import counted
from plait.workers import (
    ENTRIES,
    MACHINE_CHECK_ENTRY,
    MEASURE_ENTRY,
    PROBE_ENTRY,
    PRODUCTS_ENTRY,
    TRAINING_ENTRY,
    OnMessage,
    ask_rank_0,
)
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

STOP_GRACE_S = 120.0
# What travels as a name is printed on other hosts: no brackets, which rich takes for markup.
_DEVICE_NAME, _REASON = re.compile(r"[^\[\]\n]{0,200}"), re.compile(r"[^\[\]\x00-\x1f\x7f]{0,300}")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOnHosts:
    """The recipe and folder of a run, and the screen that its command prints on."""

    config: RunConfig
    folder: RunFolder
    screen: Screen
    working: WorkingFolder = CURRENT_FOLDER
    peak: PeakNeed = "measured"
    """What is asked of machines at once; a run that goes on by its plan measures them only where that must change."""

    entries: EntryTable = ENTRIES
    """What the ranks of this machine run."""

    @property
    def joining(self) -> JoinPolicy:
        """Whether hosts may come and go while the run goes on."""
        return "open" if self.config.recover.mode == "auto" else "closed"

    @property
    def secret_file(self) -> Path:
        """Where a secret that was shown on a terminal lives as long as the run."""
        return self.folder.path / ".secret"

    def why_full(self, others: int) -> str | None:
        """Why a further host is of no use beside host 0 and this many others, where that is known of any host."""
        named = named_degrees(self.config)
        if named is None or named.world_size > 1 + others:
            return None
        needed = counted(named.world_size, "worker")
        return (
            f"the recipe's layout needs {needed}, and the run has {1 + others} hosts; leave this one out, or leave the "
            "degrees out of [layout], so that the planner can use it"
        )


KnownMachines = dict[tuple[HostConnection | None, PeakNeed], MachineSurvey]
"""What hosts have said of themselves, by the connection to each (None for this one), with and without a peak."""


class LeaderWorkers:
    """The workers of this host and of the members that it has now, ranks numbered host by host.

    `hosts` must have admitted its members; when they change another LeaderWorkers takes over, with the same `known`
    machines. With `run.joining` "open" a training job is paused, after a checkpoint, for hosts that wait.
    """

    def __init__(self, hosts: Hosts, run: RunOnHosts, known: KnownMachines) -> None:
        self._hosts, self._run, self._known = hosts, run, known
        self.working_folder = run.working
        self._members_as_admitted = hosts.members
        self._host_order = tuple(range(1 + len(hosts.members)))
        """For each host number, the index of that host in the order of admission."""
        self._file_stager: FileStager | None = None

    @property
    def host_shares(self) -> tuple[HostShare, ...]:
        """Workers and threads of each host, host 0 first; raises PlaitError where the recipe needs another number."""
        return self._in_host_order(self._host_shares_as_admitted)

    @cached_property
    def _host_shares_as_admitted(self) -> tuple[HostShare, ...]:
        infos = [own_host_info(), *(member.host_info for member in self._hosts.members)]
        machines = [site.machine for site in self._surveys_as_admitted(self._run.peak)]
        bare = default_host_shares(
            make_names_unique([info.name for info in infos]), machines, named_workers(self._run.config)
        )
        shares = tuple(replace(share, mark=info.mark) for share, info in zip(bare, infos, strict=True))
        check_worker_count(self._run.config, shares)
        self._run.screen.print(f"hosts    {host_shares_text(shares)}")
        return shares

    @property
    def fixed_workers(self) -> FixedWorkers:
        """All hosts' workers, and the threads of those on this one."""
        return FixedWorkers(
            workers=sum(share.workers for share in self.host_shares), threads=self.host_shares[0].threads
        )

    def surveys(self, peak: PeakNeed = "measured") -> tuple[MachineSurvey, ...]:
        """Every host's machine and its arithmetic peak, host 0 first; measured on the first call."""
        return self._in_host_order(self._surveys_as_admitted(peak))

    def host_machines(self, peak: PeakNeed = "measured") -> tuple[tuple[Machine, float | None, int], ...]:
        """Every host's machine, the rate of its processor or of all its GPUs, and its workers."""
        sites = zip(self.surveys(peak), self.host_shares, strict=True)
        return tuple((site.machine, site.peak_flops, share.workers) for site, share in sites)

    def addresses(self) -> tuple[str, ...]:
        """The addresses at which the hosts reach each other, this one first."""
        return self._hosts.addresses

    def with_hosts(self, plan: Plan) -> Plan:
        """The plan with each host's share in it, once the hosts stand in the order that it names and those that it
        leaves out are sent home."""
        if order := plan.placement.host_order or self._order_without_left_out(plan):
            self._renumber_hosts(order)
            assert self.fixed_workers.workers == plan.world_size, order
            plan = replace(plan, placement=replace(plan.placement, host_order=()))
        plan = replace(plan, machines=replace(plan.machines, left_out=self._left_out))
        if hosts := refreshed_hosts(plan.machines.hosts, self.host_shares):
            return replace(plan, machines=replace(plan.machines, hosts=hosts))
        peaks = [site.peak_flops for site in self.surveys() if site.peak_flops is not None]
        peak = sum(peaks) if len(peaks) == len(self.host_shares) else None
        peak = (
            plan.machines.peak_flops if plan.arithmetic.matmul_flops else peak
        )  # the first is that of the run's own arithmetic
        return replace(
            plan,
            machines=replace(plan.machines, hosts=self.host_shares, peak_flops=peak),
            placement=replace(plan.placement, threads=self.fixed_workers.threads),
        )

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        """Run a job: a single rank on this host, or all workers on all hosts, each host in its own folder."""
        if job.world_size == 1 and job.entry != TRAINING_ENTRY:
            idle = [HostPart(ranks=0, threads=1, argument="") for _ in self._hosts.members]
            return self._hosts.run(job, on_message=on_message, parts=[own_part(job, 1, job.threads), *idle])
        if job.entry in (PROBE_ENTRY, PRODUCTS_ENTRY, MACHINE_CHECK_ENTRY):
            assert job.world_size == self.fixed_workers.workers, job
            parts = [HostPart(ranks=s.workers, threads=s.threads, argument=job.argument) for s in self.host_shares]
            return self._hosts.run(job, on_message=_of_rank_0(on_message), parts=parts)
        asked, training = read_job_argument(job.argument), job.entry == TRAINING_ENTRY
        folder = Path(asked.folder)
        if not training:  # made before anybody knew which host does what
            plan = self.with_hosts(read_plan(folder / "plan.json"))
            write_plan(
                replace(plan, job=replace(plan.job, corpus=self.working_folder.relative(plan.job.corpus))),
                folder / "plan.json",
            )
        assert job.world_size == self.fixed_workers.workers, job
        self._file_stager = self._file_stager or FileStager(
            self._hosts.members, self._run.folder.path, self._run.screen.print, self.working_folder
        )
        places = self._file_stager.stage_job_files(folder, "run" if training else "job", asked.resume)
        first, *others = self.host_shares
        parts = [own_part(job, first.workers, first.threads)]
        parts += [joined_host_part(job, share, place) for share, place in zip(others, places, strict=True)]
        membership = self._hosts.membership if training and self._run.joining == "open" else None
        heard = _of_rank_0(self._noting_saves(folder, on_message) if membership else on_message)
        on_full_host = "leave out" if membership else "wait"
        with CheckpointCollector(self._member_of, folder / "checkpoints", heard, on_full_host) as gathering:
            handle = gathering.handle_message
            result = self._hosts.run(job, on_message=handle, parts=parts, grace_s=STOP_GRACE_S, membership=membership)
        if not training:
            self._file_stager.collect_job_files(folder)
        return result

    def _noting_saves(self, folder: Path, on_message: OnMessage) -> OnMessage:
        """Lets hosts that wait be taken in after each checkpoint; after each step, where only the end is saved."""
        due = "saved" if read_plan(folder / "plan.json").cadence.checkpoint_every.value else "step"

        def heard(message: Message) -> None:
            on_message(message)
            if message.kind == due:
                self._hosts.membership.may_take_in()

        return heard

    def copied_steps(self, lineage: int) -> Sequence[int]:
        counts = [share.workers for share in self.host_shares]
        return copied_steps(self._hosts.server, self._hosts.members, counts, lineage)

    def copies(self, lineage: int) -> CopiesByStep:
        counts = [share.workers for share in self.host_shares]
        return surviving_copies(self._hosts.server, self._hosts.members, counts, lineage)

    def _renumber_hosts(self, host_order: tuple[int, ...]) -> None:
        """Give every host its number; cached values about the hosts stay in the order of admission."""
        shares = self._host_shares_as_admitted  # read before any host moves
        assert set(host_order) <= set(self._host_order), "a host that was sent home does not come back"
        if host_order != self._host_order:
            assert self._file_stager is None, "somebody was served in another order"
            self._host_order = host_order
            self._hosts.membership.renumber(host_order)
            if names := ", ".join(share.name for host, share in enumerate(shares) if host not in host_order):
                self._run.screen.print(
                    f"left out {names}: a step takes no less time with it (--why has the figures); it may be used for "
                    'something else, or write layout.devices = "all"'
                )

    def _order_without_left_out(self, plan: Plan) -> tuple[int, ...]:
        """The hosts that a begun run's plan uses, where those it leaves out have joined again; else nothing."""
        everybody = (*plan.machines.hosts, *plan.machines.left_out)
        if not plan.machines.left_out or refreshed_hosts(everybody, self.host_shares) is None:
            return ()
        return tuple(range(len(plan.machines.hosts)))

    @property
    def _left_out(self) -> tuple[HostShare, ...]:
        shares = self._host_shares_as_admitted
        return tuple(share for host, share in enumerate(shares) if host not in self._host_order)

    def _in_host_order(self, as_admitted: Sequence[_T]) -> tuple[_T, ...]:
        return tuple(as_admitted[host] for host in self._host_order)

    def _surveys_as_admitted(self, peak: PeakNeed) -> tuple[MachineSurvey, ...]:
        """Survey all hosts that are not known side by side, each in a worker that uses all its cores."""
        links = [None, *(member.link for member in self._members_as_admitted)]
        cores = [usable_cores(), *(member.host_info.cores for member in self._members_as_admitted)]
        unknown = [self._known_survey(link, peak) is None for link in links]
        if any(unknown):
            assert self._hosts.members == self._members_as_admitted, "surveyed before any host moves"
            unknown[0] = True  # rank 0 of a job over several hosts is on this one
            found = self._survey(cores, unknown, peak)
            names = ["this host", *map(str, self._members_as_admitted)]
            surveyed = [host for host, is_surveyed in enumerate(unknown) if is_surveyed]
            for rank, host in enumerate(surveyed):
                self._known[links[host], peak] = machine_survey(found.get(rank), names[host])
        surveys = [self._known_survey(link, peak) for link in links]
        return tuple(one for one in surveys if one is not None)

    def _known_survey(self, link: HostConnection | None, peak: PeakNeed) -> MachineSurvey | None:
        return self._known.get((link, "measured")) or self._known.get((link, peak))

    def _survey(self, cores: Sequence[int], chosen: Sequence[bool], peak: PeakNeed) -> dict[int, Mapping[str, Any]]:
        """What the worker of each chosen host says of its machine, by rank."""
        argument = SurveyRequest(requested=named_workers(self._run.config), peak=peak).to_json()
        job = Job(entry=MEASURE_ENTRY, argument=argument, world_size=sum(chosen), threads=1, at_stop="abandon")
        found: dict[int, Mapping[str, Any]] = {}

        def collect(message: Message) -> None:
            if message.kind == "machine":
                found[message.rank] = message.values

        pairs = zip(cores, chosen, strict=True)
        parts = [HostPart(ranks=int(takes_part), threads=n, argument=argument) for n, takes_part in pairs]
        self._hosts.run(job, on_message=collect, parts=parts).require_finished()
        return found

    def _member_of(self, rank: int) -> Member:
        """The host of a rank that is not on this one."""
        owners = [host for host, share in enumerate(self.host_shares) for _ in range(share.workers)]
        return self._hosts.members[owners[rank] - 1]


class WaitingHostWorkers:
    """The workers of one host that waits to be taken in, for jobs beside those of the run: from any thread.

    Raises PlaitError where the run has no use for such a machine. What it says of itself is added to the `known`
    machines.
    """

    def __init__(self, hosts: Hosts, run: RunOnHosts, known: KnownMachines, member: Member) -> None:
        self._hosts, self._member, self.working_folder = hosts, member, run.working
        requested = named_workers(run.config)
        argument = SurveyRequest(requested=requested, peak="measured").to_json()
        cores = member.host_info.cores
        job = Job(entry=MEASURE_ENTRY, argument=argument, world_size=1, threads=cores, at_stop="abandon")
        found = machine_survey(ask_rank_0(self, job, "machine"), str(member))
        leader = known.get((None, "measured")) or known[None, "as known"]
        _, share = default_host_shares([own_host_info().name, member.name], [leader.machine, found.machine], requested)
        known[member.link, "measured"] = found
        self.leading_machine, self.machine = leader.machine, found.machine
        self.fixed_workers = FixedWorkers(workers=share.workers, threads=share.threads)

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        return self._hosts.run_on(self._member, job, on_message)

    def copied_steps(self, lineage: int) -> Sequence[int]:
        """None: it has not trained yet."""
        return ()

    def copies(self, lineage: int) -> CopiesByStep:
        return {}


def _of_rank_0(on_message: OnMessage) -> OnMessage:
    """What the caller hears: rank 0's messages, which is on this host. Others have nothing to say to it."""
    return lambda message: on_message(message) if message.rank == 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _MachineReport:
    fingerprint: Mapping[str, Any]
    peak_flops: float | None
    peak_doubt: SingleLine = ""
    reason: str | None = None


def machine_survey(values: Mapping[str, Any] | None, host: str) -> MachineSurvey:
    """The machine that a host's worker described; raises PlaitError, with the host's name, where it did not or where
    no machine is like that."""
    try:
        report = typed_value(_MachineReport, values)
        pairs = {"versions": [list(pair) for pair in dict(report.fingerprint["versions"]).items()]}
        machine = typed_value(Machine, {**report.fingerprint, **pairs})
        names = (machine.name, *machine.unlike)
        is_right = 1 <= machine.devices <= RANKS_AT_MOST and 1 <= machine.cores <= THREADS_AT_MOST
        if not is_right or machine.memory_bytes < 0 or (report.peak_flops is not None and report.peak_flops <= 0):
            raise ValueError("a size is out of range")
        if not all(_DEVICE_NAME.fullmatch(name) for name in names) or any(len(pair) != 2 for pair in machine.versions):
            raise ValueError("a name has signs that no device's has")
        if not set(machine.without) <= {"bf16", "fp16"} or not _REASON.fullmatch(machine.uncompiled):
            raise ValueError("what its GPUs lack is not what GPUs can lack")
    except (ValueError, KeyError, TypeError) as error:
        raise PlaitError(
            f"{host} does not say what machine it is ({one_line(str(error))}); install the same commit on both"
        ) from None
    machine = replace(machine, versions=tuple(sorted(machine.versions)))
    return MachineSurvey(machine=machine, peak_flops=report.peak_flops, peak_doubt=report.peak_doubt)


def default_host_shares(
    names: Sequence[str], machines: Sequence[Machine], requested: RequestedWorkers = ANY_WORKERS
) -> tuple[HostShare, ...]:
    """One worker for each GPU of a host, or one with all its cores, unless the recipe names workers and threads of each
    host; raises PlaitError where only some have GPUs, or one has too few cores."""
    kinds = {machine.device for machine in machines}
    if len(kinds) > 1:
        by_kind = {machine.device: name for name, machine in zip(names, machines, strict=True)}
        without, has = sorted(by_kind.items(), key=lambda one: traits_of(one[0]).is_accelerator)[:2]
        lacks = "none that torch sees" if "cpu" in kinds else "another maker's"
        raise PlaitError(
            f"{has[1]} has GPUs and {without[1]} has {lacks}, and a run takes one kind; "
            'leave out one of the two, or write run.devices = "cpu"'
        )
    for name, machine in zip(names, machines, strict=True):
        check_requested_workers(requested, machine, name)
    counts = [machine.devices if requested.workers == "auto" else requested.workers for machine in machines]
    return tuple(
        HostShare(
            name=name,
            workers=workers,
            threads=requested.threads_of_each(machine, workers),
            machine=machine.digest(),
        )
        for name, machine, workers in zip(names, machines, counts, strict=True)
    )


def host_shares_text(shares: Sequence[HostShare]) -> str:
    """Workers and threads of each host, on one line."""
    each = [f"{s.name} {counted(s.workers, 'worker')} × {counted(s.threads, 'thread')}" for s in shares]
    return ", ".join(each)


def check_worker_count(config: RunConfig, shares: Sequence[HostShare]) -> None:
    """Raise PlaitError where the recipe names another number of workers than the hosts have."""
    named, workers = named_degrees(config), sum(share.workers for share in shares)
    if named and named.world_size != workers:
        listed = ", ".join(f"{share.name} {share.workers}" for share in shares)
        raise PlaitError(
            f"the recipe's layout needs {named.world_size} workers, and the hosts have {workers} ({listed}); name "
            f"degrees whose product is {workers}, or leave them out of [layout]"
        )


@contextmanager
def leader_workers(request: HostsRequest, run: RunOnHosts) -> Iterator[LeaderWorkers]:
    """Invite other hosts, wait until all have joined, and lead them; the end of the block releases them. See
    `invited_hosts`."""
    with invited_hosts(request, log=run.screen.print, entries=run.entries, working=run.working) as hosts:
        yield LeaderWorkers(hosts, run, {})
