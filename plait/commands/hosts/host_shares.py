"""How many workers each host of a run has, and how many threads each of them."""

from __future__ import annotations

from collections.abc import Sequence

from plait.errors import PlaitError
from plait.launch.remote.held_copies import copied_steps
from plait.launch.remote.leader import Hosts
from plait.machines.machine import Machine
from plait.machines.requested_workers import ANY_WORKERS, RequestedWorkers, check_requested_workers
from plait.planner.plan import HostShare
from plait.planner.resolve.named import named_degrees
from plait.recipe.schema import RunConfig
from plait.units import counted


def default_host_shares(
    names: Sequence[str], machines: Sequence[Machine], requested: RequestedWorkers = ANY_WORKERS
) -> tuple[HostShare, ...]:
    """One worker for each GPU of a host, or one with all its cores, unless the recipe names workers and threads of each
    host; raises PlaitError where only some have GPUs, or one has too few cores."""
    kinds = {machine.device for machine in machines}
    if len(kinds) > 1:
        by_kind = {machine.device: name for name, machine in zip(names, machines, strict=True)}
        raise PlaitError(
            f"{by_kind['cuda']} has GPUs and {by_kind['cpu']} has none that torch sees, and a run takes one kind; "
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


def steps_copied_by_all(hosts: Hosts, shares: Sequence[HostShare], lineage: int) -> Sequence[int]:
    """The steps of which all workers of all hosts have copies of their state, as `WorkerPool.copied_steps`."""
    return copied_steps(hosts.server, hosts.members, [share.workers for share in shares], lineage)
