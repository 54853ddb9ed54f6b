"""`plait probe`: measures what this machine, or several hosts, can do; prints a table, writes a cluster.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from plait.checked_json import typed_value
from plait.commands.planning.output_files import check_output_file, write_output_file
from plait.commands.preparing.usual_corpus import corpus_facts_or_usual
from plait.errors import PlaitError, RunFailed
from plait.hosts.joining import ONE_HOST, HostsRequest
from plait.hosts.workers import RunOnHosts, leader_workers
from plait.launch.values.job import Job
from plait.machines.catalog import link_at_rate
from plait.machines.cluster import Cluster, cluster_json, cluster_of_hosts, cluster_of_machine
from plait.machines.machine import Machine
from plait.machines.measured import Measurements
from plait.machines.requested_workers import ANY_WORKERS, RequestedWorkers, check_requested_workers
from plait.planner.derive.resources import FixedWorkers, ProbeNeed, on_paper
from plait.planner.derive.training_job import compile_of
from plait.planner.resolve.named import named_workers
from plait.planner.resolve.request import Request, request_of
from plait.probing.check import MachineCheck, check_faults, check_text, verdict_line
from plait.probing.measurements import ProbeFreshness, StoredProbe
from plait.probing.processor_arithmetic import TIMING_PRODUCTS, arithmetic_to_probe, new_with_arithmetic
from plait.probing.request import (
    ProbeRequest,
    recipe_probe_request,
    typical_probe_request,
)
from plait.probing.survey import MachineSurvey, probe_cluster, resources_of, survey_machine
from plait.recipe.load import load_recipe
from plait.recipe.schema import RunConfig
from plait.run_folder import run_folder
from plait.screen.screen import Screen
from plait.units import counted, format_duration
from plait.workers import (
    MACHINE_CHECK_ENTRY,
    WorkerPool,
    ask_rank_0,
    refuse_torchrun,
    serve_under_torchrun,
    worker_pool,
)
from plait.working_folder import CURRENT_FOLDER, WorkingFolder


def probe(
    config: RunConfig | None,
    *,
    workers: int | None,
    threads: int | None,
    fresh: ProbeFreshness,
    out: Path | None,
    screen: Screen,
    working: WorkingFolder = CURRENT_FOLDER,
) -> Cluster | None:
    """Measure this machine for a recipe's model, or for typical ones; print a table, write a cluster.json if requested,
    and return that cluster; None under torchrun on all ranks but 0.

    Raises RunFailed with the name of a dead device or link, PlaitError for what cannot be measured.
    """
    if serve_under_torchrun():
        return None
    check_output_file(out)
    named = named_workers(config) if config else ANY_WORKERS
    with worker_pool(working) as pool:
        with screen.progress() as show:
            show(0, 0, "looking at the machine")
            site = survey_machine(pool, named)
        extent = choose_probe_workers(site.machine, workers, threads, pool, named)
        requested = probe_request_for(config, site, extent, working)
        with screen.progress() as show:
            show(0, 0, TIMING_PRODUCTS)
            requested, site = with_fastest_library(requested, config, site, pool)
        screen.print(probe_start(site.machine, requested, extent))
        with screen.progress() as show:
            stored = StoredProbe(machines=[site.machine], request=requested, workers=extent, working=working)
            measured = stored.load_or_measure(pool, fresh, show)
    cluster = measured_cluster(measured, site, extent)
    end_probe(cluster, out, screen, "plait probe --again")
    return cluster


def probe_start(machine: Machine, request: ProbeRequest, probe_workers: FixedWorkers) -> str:
    """What is about to be measured, for how many workers, and roughly how long it takes."""
    shapes = "the recipe's model" if len({one.shape for one in request.models}) == 1 else "models of usual sizes"
    device = f"GPU {', '.join(map(str, machine.gpus))} of {machine.name}" if machine.gpus else machine.name
    workers = counted(probe_workers.workers, "worker")
    if machine.device == "cpu":
        workers += f" of {counted(probe_workers.threads, 'thread')}"
    together = " at the same time" if probe_workers.workers > 1 else ""
    lasts = format_duration(round(2.5 * request.seconds))
    return (
        f"probe    {device}: {workers}{together}, {request.precision}, {shapes}\n"
        f"         about {lasts}, unless it was measured before; close other programs"
    )


def choose_probe_workers(
    machine: Machine,
    workers: int | None,
    threads: int | None,
    pool: WorkerPool,
    named: RequestedWorkers = ANY_WORKERS,
) -> FixedWorkers:
    """The requested number of workers, else the recipe's (`named`), else one per GPU or processor core; raises
    PlaitError for too many."""
    if pool.fixed_workers is not None:
        return pool.fixed_workers
    check_requested_workers(named, machine)
    workers = workers or (None if named.workers == "auto" else named.workers)
    threads = threads or (None if named.threads == "auto" else named.threads)
    usual = machine.devices if machine.has_accelerators else max(1, machine.cores // (threads or 1))
    count = workers or usual
    if machine.has_accelerators and count > machine.devices:
        raise PlaitError(f"--workers {count} are more than this machine's {machine.devices} GPUs; choose fewer")
    if not machine.has_accelerators and count * (threads or 1) > machine.cores:
        raise PlaitError(
            f"{counted(count, 'worker')} of {counted(threads or 1, 'thread')} want more than this machine's "
            f"{counted(machine.cores, 'core')}, and would only measure how they take turns; choose fewer "
            "--workers or --threads"
        )
    return FixedWorkers(workers=count, threads=threads or max(1, machine.cores // count))


def measured_cluster(measured: Measurements, survey: MachineSurvey, probe_workers: FixedWorkers) -> Cluster:
    """This machine as a cluster, with what was measured on it."""
    machine = survey.machine
    if machine.device == "cpu":
        cluster = cluster_of_machine(machine, survey.peak_flops, workers=probe_workers.workers)
    else:
        cluster = cluster_of_machine(replace(machine, devices=probe_workers.workers))
    return replace(cluster, measured=measured)


# What a probe measures: the work of a recipe's model, or of usual ones.


def probe_request_for(
    config: RunConfig | None, survey: MachineSurvey, probe_workers: FixedWorkers, working: WorkingFolder
) -> ProbeRequest:
    """The measurements that a recipe's model needs, or usual models without one."""
    device, gpus = survey.machine.device, survey.machine.gpus
    if config is None:
        with_float32 = "float32" if "bf16" in survey.machine.without else None
        usual = typical_probe_request(device, probe_workers.threads, with_float32)
        compile = "off" if device == "cpu" or survey.machine.uncompiled else "blocks"
        return replace(usual, gpus=gpus, compile=compile)
    cluster = cluster_of_machine(survey.machine, survey.peak_flops if device == "cpu" else None)
    corpus, _ = corpus_facts_or_usual(config, working)
    need = _probe_need(config, request_of(config, corpus, on_paper(cluster)), [survey.machine])
    sequences = config.layout.micro_sequences
    return recipe_probe_request(need, survey.machine, probe_workers.threads, sequences=sequences)


def _probe_need(config: RunConfig, request: Request, machines: Sequence[Machine]) -> ProbeNeed:
    return ProbeNeed(
        shape=request.job.shape,
        batch_sequences=request.job.batch_sequences,
        precision=request.arithmetic.precision,
        compile=compile_of(config, machines).value,
    )


def with_fastest_library(
    requested: ProbeRequest, config: RunConfig | None, survey: MachineSurvey, workers: WorkerPool
) -> tuple[ProbeRequest, MachineSurvey]:
    """The request, and the survey with its peak, by the library of products that a run would take here: a probe must
    time the arithmetic that its plans forecast. GPUs have none to choose."""
    resources = resources_of(survey, workers)
    named = config.train.matmul_backend if config else "auto"
    found = arithmetic_to_probe(named, requested.precision, requested.models[-1], resources, workers)
    if found is None:
        return requested, survey
    requested = replace(requested, matmul_backend=found.backend, host_backends=found.host_backends)
    return requested, replace(survey, peak_flops=resources.with_arithmetic(found).peak_flops)


# The end of a probe on the screen.


def end_probe(cluster: Cluster, out: Path | None, screen: Screen, again: str) -> None:
    """Print what was measured, and write it to `out` where that is asked for; the command `again` repeats it."""
    screen.print(str(cluster))
    if warning := unsteady_text(cluster, again):
        screen.print(warning)
    if out is not None:
        write_output_file(out, cluster_json(cluster))
        screen.print(f"wrote    {out}")


def unsteady_text(cluster: Cluster, again: str) -> str:
    """Why its figures are not to be trusted, with the command that repeats them; empty where they are steady."""
    noise = cluster.measured.noise_warning if cluster.measured else ""
    return f"unsteady {noise}; close them and give {again}" if noise else ""


# `plait probe --hosts`: measures several hosts and the links between them, for one recipe's model.


def probe_hosts(
    recipe: Path, overrides: Sequence[str], *, hosts: HostsRequest, out: Path | None, screen: Screen
) -> None:
    """Wait for the other hosts, measure on all of them at once what the recipe's model needs, print it, write
    cluster.json.

    Blocks until all have joined (`plait join`). Raises PlaitError or RunFailed in one sentence.
    """
    check_output_file(out)
    config = load_recipe(recipe, overrides)
    run = RunOnHosts(config=config, folder=run_folder(config.run.name), screen=screen)
    with leader_workers(hosts, run) as workers:
        found = workers.host_machines()
        corpus, _ = corpus_facts_or_usual(config)
        seen = on_paper(cluster_of_hosts(found, link_at_rate(1, "machine")))
        request = request_of(config, corpus, seen)
        with screen.progress() as show:
            show(0, 0, TIMING_PRODUCTS)
            resources = replace(seen, fixed_workers=workers.fixed_workers)
            arithmetic = new_with_arithmetic(config, request.job, resources, workers, rates="again").arithmetic
        need = _probe_need(config, request, [machine for machine, _, _ in found])
        if arithmetic:
            need = replace(need, matmul_backend=arithmetic.backend, host_backends=arithmetic.host_backends)
        with screen.progress() as show:
            cluster = probe_cluster(workers, found, need, fresh="again", show=show)
    if cluster.measured is None:
        raise RunFailed("the probe ended without measurements; give the same command again")
    end_probe(cluster, out, screen, "the same command again")


# `plait probe --check`: whether machines can train, in words and within a minute, before anybody pays for them.


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
    run = RunOnHosts(config=config, folder=run_folder(config.run.name, working), screen=screen, working=working)
    with leader_workers(hosts, run) as workers:
        fixed = workers.fixed_workers
        assert fixed is not None, "hosts that joined bring their workers"
        first = workers.host_machines("as known")[0][0]
        return _ask(workers, first.device, fixed.workers, fixed.threads, first.gpus)


def check_workers(machine: Machine) -> int:
    """One worker for each GPU, or for each core of a processor up to MOST_CPU_WORKERS."""
    return machine.devices if machine.has_accelerators else min(machine.cores, MOST_CPU_WORKERS)


def _ask(pool: WorkerPool, device: str, workers: int, threads: int, gpus: Sequence[int]) -> MachineCheck:
    argument = json.dumps({"device": device, "gpus": list(gpus)})
    job = Job(entry=MACHINE_CHECK_ENTRY, argument=argument, world_size=workers, threads=threads)
    return parse_check(ask_rank_0(pool, job, "checked"))


def parse_check(values: Mapping[str, Any]) -> MachineCheck:
    """Rank 0's report; raises RunFailed if it is not a check."""
    try:
        return typed_value(MachineCheck, values)
    except ValueError as error:
        raise RunFailed(f"the check's result is not usable ({error}); install the same commit on all hosts") from None
