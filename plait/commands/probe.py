"""`plait probe`: measures what this machine, or several hosts, can do; prints a table, writes a cluster.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from plait.cluster.cluster import Cluster
from plait.cluster.machine_cluster import cluster_of_machine
from plait.cluster.measured import Measurements
from plait.cluster.probe.request import ProbeRequest
from plait.cluster.requested_workers import ANY_WORKERS, RequestedWorkers, check_requested_workers
from plait.cluster.topology import Machine
from plait.commands.planning.arithmetic import TIMING_PRODUCTS
from plait.commands.planning.measuring import MachineSurvey, survey_machine
from plait.commands.planning.output_files import check_output_file
from plait.commands.planning.workers import WorkerPool, serve_under_torchrun, worker_pool
from plait.commands.probing.choose_request import probe_request_for, with_fastest_library
from plait.commands.probing.ending import end_probe
from plait.commands.probing.measurements import ProbeFreshness, ProbeWorkers, measure_or_load
from plait.errors import PlaitError
from plait.planner.resolve.named_workers import named_workers
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.units import counted, format_duration
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
            measured = measure_or_load(pool, [site.machine], requested, extent, fresh=fresh, show=show)
    cluster = measured_cluster(measured, site, extent)
    end_probe(cluster, out, screen, "plait probe --again")
    return cluster


def probe_start(machine: Machine, request: ProbeRequest, probe_workers: ProbeWorkers) -> str:
    """What is about to be measured, for how many workers, and about how long that takes."""
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
) -> ProbeWorkers:
    """The requested number of workers, else the recipe's (`named`), else one per GPU or processor core; raises
    PlaitError for too many."""
    if pool.fixed_workers is not None:
        return ProbeWorkers(workers=pool.fixed_workers.workers, threads=pool.fixed_workers.threads)
    check_requested_workers(named, machine)
    workers = workers or (None if named.workers == "auto" else named.workers)
    threads = threads or (None if named.threads == "auto" else named.threads)
    usual = machine.devices if machine.device == "cuda" else max(1, machine.cores // (threads or 1))
    count = workers or usual
    if machine.device == "cuda" and count > machine.devices:
        raise PlaitError(f"--workers {count} are more than this machine's {machine.devices} GPUs; choose fewer")
    if machine.device == "cpu" and count * (threads or 1) > machine.cores:
        raise PlaitError(
            f"{counted(count, 'worker')} of {counted(threads or 1, 'thread')} want more than this machine's "
            f"{counted(machine.cores, 'core')}, and would only measure how they take turns; choose fewer "
            "--workers or --threads"
        )
    return ProbeWorkers(workers=count, threads=threads or max(1, machine.cores // count))


def measured_cluster(measured: Measurements, survey: MachineSurvey, probe_workers: ProbeWorkers) -> Cluster:
    """This machine as a cluster, with what was measured on it."""
    machine = survey.machine
    if machine.device == "cpu":
        cluster = cluster_of_machine(machine, survey.peak_flops, workers=probe_workers.workers)
    else:
        cluster = cluster_of_machine(replace(machine, devices=probe_workers.workers))
    return replace(cluster, measured=measured)
