"""`plait probe --check`: whether machines can train, in words and within a minute, before anybody pays for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from plait.checked_json import typed_value
from plait.cluster.requested_workers import ANY_WORKERS
from plait.cluster.topology import Machine
from plait.commands.hosts.invitation import ONE_HOST, HostsRequest
from plait.commands.hosts.members.invited import leader_workers
from plait.commands.planning.measuring import ask_rank_0, survey_machine
from plait.commands.planning.workers import MACHINE_CHECK_ENTRY, WorkerPool, refuse_torchrun, worker_pool
from plait.commands.probing.checking.check_result import MachineCheck, check_faults, check_text, verdict_line
from plait.errors import PlaitError, RunFailed
from plait.launch.values.job import Job
from plait.planner.resolve.named_workers import named_workers
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

MOST_CPU_WORKERS = 8
"""More workers of one processor's cores would only take longer: their links are all in the same memory."""
Readiness = Literal["ready", "not ready"]


def check_machines(
    config: RunConfig | None,
    *,
    hosts: HostsRequest = ONE_HOST,
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
) -> Readiness:
    """Look at devices, links, an all-reduce, memory, disk and versions, print a verdict, and return it.

    Over several hosts it waits until the others have joined, and needs the recipe that they join for. A device, link or
    host that fails is a verdict, not an exception.
    """
    refuse_torchrun()
    if hosts.n_hosts > 1 and config is None:
        raise PlaitError("over several hosts a check needs the recipe that they join for; name it")
    try:
        found = (
            _checked_hosts(config, hosts, screen, working)
            if config and hosts.n_hosts > 1
            else _checked(config, working)
        )
    except RunFailed as error:
        screen.print(verdict_line((str(error),), "even"))
        return "not ready"
    screen.print(check_text(found))
    return "not ready" if check_faults(found) else "ready"


def _checked(config: RunConfig | None, working: WorkingFolder) -> MachineCheck:
    """This machine alone. Raises RunFailed also for devices that torch cannot use."""
    with worker_pool(working) as pool:
        try:
            requested = named_workers(config) if config else ANY_WORKERS
            machine = survey_machine(pool, requested, "as known").machine
        except PlaitError as error:
            raise RunFailed(str(error)) from error
        workers = check_workers(machine)
        return _ask(pool, machine.device, workers, max(1, machine.cores // workers), machine.gpus)


def _checked_hosts(config: RunConfig, hosts: HostsRequest, screen: Screen, working: WorkingFolder) -> MachineCheck:
    """All hosts once they have joined, with all workers that they bring."""
    folder = working.runs / config.run.name
    with leader_workers(hosts, config=config, folder=folder, log=screen.print, working=working) as workers:
        fixed = workers.fixed_workers
        assert fixed is not None, "hosts that joined bring their workers"
        first = workers.host_machines("as known")[0][0]
        return _ask(workers, first.device, fixed.workers, fixed.threads, first.gpus)


def check_workers(machine: Machine) -> int:
    """One worker for each GPU, or for each core of a processor up to MOST_CPU_WORKERS."""
    return machine.devices if machine.device == "cuda" else min(machine.cores, MOST_CPU_WORKERS)


def _ask(pool: WorkerPool, device: str, workers: int, threads: int, gpus: Sequence[int]) -> MachineCheck:
    argument = json.dumps({"device": device, "gpus": list(gpus)})
    job = Job(entry=MACHINE_CHECK_ENTRY, argument=argument, world_size=workers, threads=threads)
    return parse_check(ask_rank_0(pool, job, "checked"))


def parse_check(values: Mapping[str, Any]) -> MachineCheck:
    """What rank 0 sent; raises RunFailed where it is no check."""
    try:
        return typed_value(MachineCheck, values)
    except ValueError as error:
        raise RunFailed(f"the check's result is not usable ({error}); install the same commit on all hosts") from None
