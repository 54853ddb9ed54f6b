"""A run over several hosts, seen from host 0: who may join, how many workers each has, and how a job runs on all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from plait.checkpoint.arrival import IN_ALL_S
from plait.cluster.topology import Machine, numbered_names, usable_cores
from plait.commands.hosts.collect_checkpoint import CheckpointCollector
from plait.commands.hosts.file_stager import FileStager, StagingFolder
from plait.commands.hosts.host_info import objection, own_host_info
from plait.commands.hosts.invitation import HostsRequest, chosen_address, chosen_secret
from plait.commands.planning.make_plan import Log, MachineSurvey
from plait.commands.planning.workers import PRELOAD, OnMessage
from plait.commands.preparing.corpus import CACHE
from plait.errors import Interrupted, PlaitError
from plait.launch.remote.connectivity import TestListener, check_connectivity
from plait.launch.remote.host_numbering import HostIdentity
from plait.launch.remote.leader import HostPart, Hosts, Member
from plait.launch.values.job import Job, JobResult, Message
from plait.planner.derive.resources import FixedWorkers
from plait.planner.plan import HostShare, Plan, refreshed_hosts
from plait.planner.plan_file import read_plan, write_plan
from plait.planner.resolve.named_layout import named_degrees
from plait.recipe.schema import RunConfig
from plait.units import counted

JOIN_WITHIN_S, GRACE_S = 3600.0, 120.0
TRAINING = "plait.trainer.worker:main"
PROBE = "plait.commands.probing.rank:rank"
_T = TypeVar("_T")


class LeaderWorkers:
    """The workers of this host and of those that joined it, ranks numbered host by host.

    `hosts` must have admitted its members; `folder` is the run's.
    """

    def __init__(self, hosts: Hosts, *, folder: Path, config: RunConfig, say: Log) -> None:
        self._hosts, self._folder, self._config, self._say = hosts, folder, config, say
        self._seats = tuple(range(1 + len(hosts.members)))
        """Which of the hosts, as they were admitted, takes each place."""
        self._freight: FileStager | None = None

    @property
    def shares(self) -> tuple[HostShare, ...]:
        """What each host does, host 0 first; raises PlaitError where that does not go with the recipe."""
        return self._seated(self._shares)

    @cached_property
    def _shares(self) -> tuple[HostShare, ...]:
        hellos = [own_host_info(), *(member.hello for member in self._hosts.members)]
        names = [own_host_info()["name"], *(member.name for member in self._hosts.members)]
        bare = host_shares(numbered_names(names), [site.machine for site in self._sites])
        shares = tuple(replace(share, mark=hello["mark"]) for share, hello in zip(bare, hellos, strict=True))
        check_worker_count(self._config, shares)
        self._say(f"hosts    {host_shares_text(shares)}")
        return shares

    @property
    def fixed_workers(self) -> FixedWorkers:
        """All hosts' workers, and the threads of those on this one."""
        return FixedWorkers(workers=sum(share.workers for share in self.shares), threads=self.shares[0].threads)

    def sites(self) -> tuple[MachineSurvey, ...]:
        """Every host's machine and its arithmetic peak, host 0 first; they are measured when this is first asked."""
        return self._seated(self._sites)

    def hosts(self) -> tuple[tuple[Machine, float | None, int], ...]:
        """Every host's machine, the rate of its processor or of all its GPUs, and its workers."""
        sites = zip(self.sites(), self.shares, strict=True)
        return tuple((site.machine, site.peak_flops, share.workers) for site, share in sites)

    def addresses(self) -> tuple[str, ...]:
        """Where the hosts reach each other, this one first."""
        return self._hosts.addresses

    def with_hosts(self, plan: Plan) -> Plan:
        """The plan with each host's part in it, once all have taken the places that it gives them."""
        if plan.host_order:
            self._take(plan.host_order)
            plan = replace(plan, host_order=())
        if hosts := refreshed_hosts(plan.hosts, self.shares):
            return replace(plan, hosts=hosts)
        peaks = [site.peak_flops for site in self.sites() if site.peak_flops is not None]
        peak = sum(peaks) if len(peaks) == len(self.shares) else None
        return replace(plan, hosts=self.shares, threads=self.fixed_workers.threads, peak_flops=peak)

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        """A single rank runs on this host; a job of all workers runs on all, in the folder that each has for it."""
        if job.world_size == 1:
            idle = [HostPart(ranks=0, threads=1, argument="") for _ in self._hosts.members]
            return self._hosts.run(job, on_message=on_message, parts=[_own_part(job, 1, job.threads), *idle])
        assert job.world_size == self.fixed_workers.workers, job
        if job.entry == PROBE:
            return self._hosts.run(job, on_message=on_message, parts=self._probe_parts(job))
        folder, training = folder_of(job.argument), job.entry == TRAINING
        resume = json.loads(job.argument)["resume"] if training else None
        if not training:  # made before anybody knew which host does what
            plan = self.with_hosts(read_plan(folder / "plan.json"))
            write_plan(replace(plan, corpus=_named_alike(plan.corpus)), folder / "plan.json")
        self._freight = self._freight or FileStager(self._hosts.members, self._folder, self._say)
        places = self._freight.deliver(folder, "run" if training else "job", resume)
        first, *others = self.shares
        parts = [_own_part(job, first.workers, first.threads)]
        parts += [_part(job, share, place) for share, place in zip(others, places, strict=True)]
        grace_s = (
            GRACE_S if all(place.shared for place in places) else IN_ALL_S + GRACE_S
        )  # parts travel at the end, too
        with CheckpointCollector(self._member_of, folder / "checkpoints", on_message) as gathering:
            result = self._hosts.run(job, on_message=gathering.hear, parts=parts, grace_s=grace_s)
        if not training:
            self._freight.bring_back(folder)
        return result

    def _probe_parts(self, job: Job) -> list[HostPart]:
        """Every host's workers, who need no file."""
        return [HostPart(ranks=s.workers, threads=s.threads, argument=job.argument) for s in self.shares]

    def _take(self, seats: tuple[int, ...]) -> None:
        """Every host takes its place; what is known of them stays in the order in which they were admitted."""
        assert len(self._shares) == len(seats), seats  # which asks for them before anybody moves
        if seats != self._seats:
            assert self._freight is None, "somebody was served in another order"
            self._seats = seats
            self._hosts.renumber(seats)

    def _seated(self, as_admitted: Sequence[_T]) -> tuple[_T, ...]:
        return tuple(as_admitted[host] for host in self._seats)

    @cached_property
    def _sites(self) -> tuple[MachineSurvey, ...]:
        """Measure all hosts side by side, each in a worker that uses all its cores."""
        cores = [usable_cores(), *(member.hello["cores"] for member in self._hosts.members)]
        job = Job(entry="plait.cluster.measure:rank", argument="", world_size=len(cores), threads=1)
        found: dict[int, Mapping[str, Any]] = {}

        def hear(message: Message) -> None:
            if message.kind == "machine":
                found[message.rank] = message.values

        parts = [HostPart(ranks=1, threads=number, argument="") for number in cores]
        result = self._hosts.run(job, on_message=hear, parts=parts)
        if result.stopped_by != "finished":
            raise Interrupted(result.stopped_by)
        return tuple(
            MachineSurvey(
                machine=Machine.from_fingerprint(found[host]["fingerprint"]), peak_flops=found[host]["peak_flops"]
            )
            for host in range(len(cores))
        )

    def _member_of(self, rank: int) -> Member:
        """The host of a rank that is not on this one."""
        owners = [host for host, share in enumerate(self.shares) for _ in range(share.workers)]
        return self._hosts.members[owners[rank] - 1]


@contextmanager
def leader_workers(
    asked: HostsRequest, *, config: RunConfig, folder: Path, screen: Console, order: Sequence[HostIdentity] = ()
) -> Iterator[LeaderWorkers]:
    """Invite other hosts, wait until all are in, and lead them; the block's end sends them home.

    Those known in `order`, by mark or name, are numbered as they stand there, the others behind them by address.
    Raises PlaitError where the address, the port or the secret cannot be used, or nobody came for an hour.
    """
    address = chosen_address(asked.address)
    secret, told = chosen_secret(asked.secret_file)
    members = asked.hosts - 1
    with Hosts(address=address, port=asked.port, secret=secret, members=members, preload=PRELOAD) as hosts:
        others = "the other host" if members == 1 else f"each of the {members} other hosts"
        screen.print(f"hosts    {asked.hosts}; on {others}, in the folder to work in, type:")
        screen.print(f"             plait join {hosts.join_address}", highlight=False)
        screen.print(f"         {told}", highlight=False)

        def check(hello: Mapping[str, Any]) -> str | None:
            sentence, name = objection(hello, own_host_info()), str(hello.get("name"))[:80]
            if sentence is None:
                screen.print(f"joined   {name}: {counted(hello['cores'], 'core')}", markup=False)
            else:
                screen.print(f"refused  {name}: {sentence}", markup=False)
            return sentence

        arrived = hosts.admit(
            check, JOIN_WITHIN_S, order=order, on_lost=lambda name: screen.print(f"lost     {name}", markup=False)
        )
        check_connectivity(TestListener(own_host_info()["name"], address), arrived)
        yield LeaderWorkers(hosts, folder=folder, config=config, say=screen.print)


def host_shares(names: Sequence[str], machines: Sequence[Machine]) -> tuple[HostShare, ...]:
    """How each host is used unless somebody says otherwise: a worker for each GPU, or one with all the cores."""
    kinds = {machine.device for machine in machines}
    if len(kinds) > 1:
        by_kind = {machine.device: name for name, machine in zip(names, machines, strict=True)}
        raise PlaitError(
            f"{by_kind['cuda']} has GPUs and {by_kind['cpu']} has none that torch sees, and a run takes one kind; "
            "leave the odd host out, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        )
    return tuple(
        HostShare(
            name=name,
            workers=machine.devices,
            threads=max(1, machine.cores // machine.devices),
            machine=machine.digest(),
        )
        for name, machine in zip(names, machines, strict=True)
    )


def host_shares_text(shares: Sequence[HostShare]) -> str:
    """Who does what, on a line."""
    each = [f"{s.name} {s.workers} worker{'s' * (s.workers > 1)} × {s.threads} threads" for s in shares]
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


def folder_of(argument: str) -> Path:
    """The folder that a job is about: its argument, or "folder" in it."""
    return Path(json.loads(argument)["folder"] if argument.startswith("{") else argument)


def _named_alike(corpus: str) -> str:
    """Prepared data by a name that holds on every host: a folder that they share may be mounted elsewhere on each."""
    here, cache = Path(corpus).resolve(), CACHE.resolve()
    return str(CACHE / here.relative_to(cache)) if here.is_relative_to(cache) else corpus


def _own_part(job: Job, ranks: int, threads: int) -> HostPart:
    return HostPart(ranks=ranks, threads=threads, argument=job.argument, log_dir=job.log_dir)


def _part(job: Job, share: HostShare, place: StagingFolder) -> HostPart:
    """A joined host's part: the same in the folder that it has for it."""
    argument, training = place.path, job.entry == TRAINING
    if job.argument.startswith("{"):
        sent = {"parts": "sent"} if training and not place.shared else {}
        argument = json.dumps({**json.loads(job.argument), "folder": place.path, **sent})
    log_dir = f"{place.path}/logs" if training else place.path
    return HostPart(ranks=share.workers, threads=share.threads, argument=argument, log_dir=log_dir)
