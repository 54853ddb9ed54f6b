"""A run over several hosts, seen from host 0: who may join, how many workers each has, and how a job runs on all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from plait.cluster.topology import Machine, make_names_unique, usable_cores
from plait.commands.hosts.collect_checkpoint import TRAVEL_GRACE_S, CheckpointCollector
from plait.commands.hosts.file_stager import FileStager
from plait.commands.hosts.host_info import (
    failed_attempts_text,
    joined_host_text,
    machine_survey,
    own_host_info,
    why_host_cannot_join,
)
from plait.commands.hosts.host_shares import (
    check_worker_count,
    default_host_shares,
    host_shares_text,
    steps_copied_by_all,
)
from plait.commands.hosts.invitation import HostsRequest, choose_address, choose_secret, invitation_text
from plait.commands.hosts.job_argument import joined_host_part, own_part, read_job_argument
from plait.commands.planning.make_plan import Log
from plait.commands.planning.measuring import MachineSurvey
from plait.commands.planning.workers import (
    ENTRIES,
    MACHINE_CHECK_ENTRY,
    MEASURE_ENTRY,
    PROBE_ENTRY,
    PRODUCTS_ENTRY,
    TRAINING_ENTRY,
    OnMessage,
)
from plait.launch.remote.connectivity import ConnectivityListener, check_connectivity
from plait.launch.remote.host_numbering import HostIdentity
from plait.launch.remote.leader import HostPart, Hosts, Member
from plait.launch.values.job import Job, JobResult, Message
from plait.planner.derive.resources import FixedWorkers
from plait.planner.plan import HostShare, Plan, refreshed_hosts
from plait.planner.plan_file import read_plan, write_plan
from plait.planner.resolve.named_workers import named_workers
from plait.recipe.schema import RunConfig
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

JOIN_TIMEOUT_S, STOP_GRACE_S = 3600.0, 120.0
_T = TypeVar("_T")


class LeaderWorkers:
    """The workers of this host and of those that joined it, ranks numbered host by host.

    `hosts` must have admitted its members; `folder` is the run's.
    """

    def __init__(
        self, hosts: Hosts, *, folder: Path, config: RunConfig, log: Log, working: WorkingFolder = CURRENT_FOLDER
    ) -> None:
        self._hosts, self._folder, self._config, self._log = hosts, folder, config, log
        self.working_folder = working
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
        names = [own_host_info()["name"], *(member.name for member in self._hosts.members)]
        machines = [site.machine for site in self._surveys_as_admitted]
        bare = default_host_shares(make_names_unique(names), machines, named_workers(self._config))
        shares = tuple(replace(share, mark=info["mark"]) for share, info in zip(bare, infos, strict=True))
        check_worker_count(self._config, shares)
        self._log(f"hosts    {host_shares_text(shares)}")
        return shares

    @property
    def fixed_workers(self) -> FixedWorkers:
        """All hosts' workers, and the threads of those on this one."""
        return FixedWorkers(
            workers=sum(share.workers for share in self.host_shares), threads=self.host_shares[0].threads
        )

    def surveys(self) -> tuple[MachineSurvey, ...]:
        """Every host's machine and its arithmetic peak, host 0 first; measured on the first call."""
        return self._in_host_order(self._surveys_as_admitted)

    def host_machines(self) -> tuple[tuple[Machine, float | None, int], ...]:
        """Every host's machine, the rate of its processor or of all its GPUs, and its workers."""
        sites = zip(self.surveys(), self.host_shares, strict=True)
        return tuple((site.machine, site.peak_flops, share.workers) for site, share in sites)

    def addresses(self) -> tuple[str, ...]:
        """The addresses at which the hosts reach each other, this one first."""
        return self._hosts.addresses

    def with_hosts(self, plan: Plan) -> Plan:
        """The plan with each host's share in it, once the hosts stand in the order that it names and those that it
        leaves out are sent home."""
        if order := plan.host_order or self._order_without_left_out(plan):
            self._renumber_hosts(order)
            assert self.fixed_workers.workers == plan.world_size, order
            plan = replace(plan, host_order=())
        plan = replace(plan, left_out=self._left_out)
        if hosts := refreshed_hosts(plan.hosts, self.host_shares):
            return replace(plan, hosts=hosts)
        peaks = [site.peak_flops for site in self.surveys() if site.peak_flops is not None]
        peak = sum(peaks) if len(peaks) == len(self.host_shares) else None
        peak = plan.peak_flops if plan.matmul_flops else peak  # the first is that of the run's own arithmetic
        return replace(plan, hosts=self.host_shares, threads=self.fixed_workers.threads, peak_flops=peak)

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        """Run a job: a single rank on this host, or all workers on all hosts, each host in its own folder."""
        if job.world_size == 1:
            idle = [HostPart(ranks=0, threads=1, argument="") for _ in self._hosts.members]
            return self._hosts.run(job, on_message=on_message, parts=[own_part(job, 1, job.threads), *idle])
        if job.entry in (PROBE_ENTRY, PRODUCTS_ENTRY, MACHINE_CHECK_ENTRY):
            assert job.world_size == self.fixed_workers.workers, job
            return self._hosts.run(job, on_message=_of_rank_0(on_message), parts=self._probe_parts(job))
        asked, training = read_job_argument(job.argument), job.entry == TRAINING_ENTRY
        folder = Path(asked.folder)
        if not training:  # made before anybody knew which host does what
            plan = self.with_hosts(read_plan(folder / "plan.json"))
            write_plan(replace(plan, corpus=self.working_folder.relative(plan.corpus)), folder / "plan.json")
        assert job.world_size == self.fixed_workers.workers, job
        self._file_stager = self._file_stager or FileStager(
            self._hosts.members, self._folder, self._log, self.working_folder
        )
        places = self._file_stager.stage_job_files(folder, "run" if training else "job", asked.resume)
        first, *others = self.host_shares
        parts = [own_part(job, first.workers, first.threads)]
        parts += [joined_host_part(job, share, place) for share, place in zip(others, places, strict=True)]
        # At the end parts of a checkpoint travel, too, unless all hosts share the folder.
        grace_s = STOP_GRACE_S + (0.0 if all(place.is_shared for place in places) else TRAVEL_GRACE_S)
        with CheckpointCollector(self._member_of, folder / "checkpoints", _of_rank_0(on_message)) as gathering:
            result = self._hosts.run(job, on_message=gathering.handle_message, parts=parts, grace_s=grace_s)
        if not training:
            self._file_stager.collect_job_files(folder)
        return result

    def copied_steps(self, lineage: int) -> Sequence[int]:
        return steps_copied_by_all(self._hosts, self.host_shares, lineage)

    def _probe_parts(self, job: Job) -> list[HostPart]:
        """The part of every host in a probe: all its workers, and no files."""
        return [HostPart(ranks=s.workers, threads=s.threads, argument=job.argument) for s in self.host_shares]

    def _renumber_hosts(self, host_order: tuple[int, ...]) -> None:
        """Give every host its number; cached values about the hosts stay in the order of admission."""
        shares = self._host_shares_as_admitted  # read before any host moves
        assert set(host_order) <= set(self._host_order), "a host that was sent home does not come back"
        if host_order != self._host_order:
            assert self._file_stager is None, "somebody was served in another order"
            self._host_order = host_order
            self._hosts.renumber(host_order)
            if names := ", ".join(share.name for host, share in enumerate(shares) if host not in host_order):
                self._log(f"left out {names}: a step takes no less time with it; it may be used for something else")

    def _order_without_left_out(self, plan: Plan) -> tuple[int, ...]:
        """The hosts that a begun run's plan uses, where those it leaves out have joined again; else nothing."""
        everybody = (*plan.hosts, *plan.left_out)
        if not plan.left_out or refreshed_hosts(everybody, self.host_shares) is None:
            return ()
        return tuple(range(len(plan.hosts)))

    @property
    def _left_out(self) -> tuple[HostShare, ...]:
        shares = self._host_shares_as_admitted
        return tuple(share for host, share in enumerate(shares) if host not in self._host_order)

    def _in_host_order(self, as_admitted: Sequence[_T]) -> tuple[_T, ...]:
        return tuple(as_admitted[host] for host in self._host_order)

    @cached_property
    def _surveys_as_admitted(self) -> tuple[MachineSurvey, ...]:
        """Measure all hosts side by side, each in a worker that uses all its cores."""
        cores = [usable_cores(), *(member.host_info["cores"] for member in self._hosts.members)]
        argument = named_workers(self._config).to_json()
        job = Job(entry=MEASURE_ENTRY, argument=argument, world_size=len(cores), threads=1, at_stop="abandon")
        found: dict[int, Mapping[str, Any]] = {}

        def collect(message: Message) -> None:
            if message.kind == "machine":
                found[message.rank] = message.values

        parts = [HostPart(ranks=1, threads=number, argument=argument) for number in cores]
        result = self._hosts.run(job, on_message=collect, parts=parts)
        result.require_finished()
        names = ["this host", *map(str, self._hosts.members)]
        return tuple(machine_survey(found.get(host), name) for host, name in enumerate(names))

    def _member_of(self, rank: int) -> Member:
        """The host of a rank that is not on this one."""
        owners = [host for host, share in enumerate(self.host_shares) for _ in range(share.workers)]
        return self._hosts.members[owners[rank] - 1]


@contextmanager
def leader_workers(
    request: HostsRequest,
    *,
    config: RunConfig,
    folder: Path,
    log: Log,
    previous_hosts: Sequence[HostIdentity] = (),
    working: WorkingFolder = CURRENT_FOLDER,
) -> Iterator[LeaderWorkers]:
    """Invite other hosts, wait until all have joined, and lead them; the end of the block releases them.

    Hosts in `previous_hosts`, matched by mark or name, keep their order; the others follow, sorted by address.
    Raises PlaitError where the address, the port or the secret cannot be used, or nobody came for an hour.
    """
    address = choose_address(request.address)
    secret, told = choose_secret(request.secret_file)
    members = request.n_hosts - 1
    with Hosts(
        address=address,
        port=request.port,
        secret=secret,
        members=members,
        entries=ENTRIES,
        working_folder=working.path,
    ) as hosts:
        log(invitation_text(members, hosts.join_address, told))

        def check(host_info: Mapping[str, Any]) -> str | None:
            sentence, name = (
                why_host_cannot_join(host_info, own_host_info()),
                " ".join(str(host_info.get("name")).split())[:80],
            )
            if sentence is None:
                log(f"joined   {joined_host_text(name, host_info)}")
            else:
                log(f"refused  {name}: {' '.join(sentence.split())}")
            return sentence

        arrived = hosts.admit(
            check,
            JOIN_TIMEOUT_S,
            order=previous_hosts,
            on_lost=lambda name: log(f"lost     {name}"),
            on_failed=lambda count: log(f"refused  {failed_attempts_text(count)}"),
        )
        check_connectivity(ConnectivityListener(own_host_info()["name"], address), arrived)
        yield LeaderWorkers(hosts, folder=folder, config=config, log=log, working=working)


def _of_rank_0(on_message: OnMessage) -> OnMessage:
    """What the caller hears: rank 0's messages, which is on this host. Others have nothing to say to it."""
    return lambda message: on_message(message) if message.rank == 0 else None
