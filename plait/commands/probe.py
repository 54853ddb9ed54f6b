"""`plait probe`: measures what this machine, or several hosts, can do; prints a table, writes a cluster.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from plait.cluster.cluster import Cluster, cluster_json
from plait.cluster.machine_cluster import cluster_of_machine
from plait.cluster.measured import (
    Measurements,
)
from plait.cluster.probe.request import (
    MAX_CPU_MICROBATCH_TOKENS,
    ProbeRequest,
    model_probe_request,
    typical_probe_request,
)
from plait.cluster.topology import Machine
from plait.commands.planning.measuring import MachineSurvey, survey_machine
from plait.commands.planning.output_files import check_output_file, write_output_file
from plait.commands.planning.workers import WorkerPool, serve_under_torchrun, worker_pool
from plait.commands.preparing.usual_corpus import corpus_facts_or_usual
from plait.commands.probing.measurements import ProbeFreshness, ProbeWorkers, measure_or_load
from plait.commands.probing.table import measurements_table
from plait.errors import PlaitError
from plait.planner.derive.resources import on_paper
from plait.planner.resolve.request import request_of
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.units import counted
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
    with worker_pool(working) as pool:
        site = survey_machine(pool)
        extent = choose_probe_workers(site.machine, workers, threads, pool)
        requested = probe_request_for(config, site, extent, working)
        measured = measure_or_load(pool, [site.machine], requested, extent, fresh=fresh)
    screen.print(measurements_table(measured))
    if measured.noise_warning:
        screen.print(f"unsteady {measured.noise_warning}; close them and give plait probe --again")
    cluster = measured_cluster(measured, site, extent)
    if out is not None:
        write_output_file(out, cluster_json(cluster))
        screen.print(f"wrote    {out}")
    return cluster


def choose_probe_workers(machine: Machine, workers: int | None, threads: int | None, pool: WorkerPool) -> ProbeWorkers:
    """The requested number of workers, or one per GPU or processor core; raises PlaitError for too many."""
    if pool.fixed_workers is not None:
        return ProbeWorkers(workers=pool.fixed_workers.workers, threads=pool.fixed_workers.threads)
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


def probe_request_for(
    config: RunConfig | None, survey: MachineSurvey, probe_workers: ProbeWorkers, working: WorkingFolder
) -> ProbeRequest:
    """What a recipe's model needs measured, or usual models without one."""
    device = survey.machine.device
    if config is None:
        return typical_probe_request(device, probe_workers.threads)
    cluster = cluster_of_machine(survey.machine, survey.peak_flops if device == "cpu" else None)
    corpus, _ = corpus_facts_or_usual(config, working)
    job = request_of(config, corpus, on_paper(cluster)).job
    sequence = job.shape.sequence
    sequences = config.layout.micro_sequences
    if sequences == "auto":
        most = max(1, MAX_CPU_MICROBATCH_TOKENS // sequence) if device == "cpu" else job.batch_sequences
        sequences = min(most, job.batch_sequences)
    return model_probe_request(
        job.shape,
        sequence=sequence,
        sequences=sequences,
        device=device,
        precision="bf16" if job.precision == "bf16" else "float32",
        threads=probe_workers.threads,
    )


def measured_cluster(measured: Measurements, survey: MachineSurvey, probe_workers: ProbeWorkers) -> Cluster:
    """This machine as a cluster, with what was measured on it."""
    machine = survey.machine
    if machine.device == "cpu":
        cluster = cluster_of_machine(machine, survey.peak_flops, workers=probe_workers.workers)
    else:
        cluster = cluster_of_machine(replace(machine, devices=probe_workers.workers))
    return replace(cluster, measured=measured)
