"""What a recipe's [run] names of devices, workers and threads, as the planner takes it."""

from __future__ import annotations

from dataclasses import replace

from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.requested_workers import RequestedWorkers, check_requested_workers
from plait.planner.derive.resources import Resources
from plait.recipe.schema import RunConfig
from plait.units import counted


def named_workers(config: RunConfig) -> RequestedWorkers:
    """The recipe's devices, workers and threads."""
    run = config.run
    return RequestedWorkers(devices=run.devices, workers=run.workers, threads=run.threads)


def with_named_workers(config: RunConfig, resources: Resources) -> Resources:
    """The resources as far as the recipe allows their use."""
    return replace(resources, requested=named_workers(config))


def check_named_workers(resources: Resources, degrees: Layout | None) -> None:
    """Raise PlaitError where the recipe's workers and threads contradict the machine, launcher or named degrees."""
    fixed, machine, requested = resources.fixed_workers, resources.machine, resources.requested
    if requested.is_open or not resources.is_here:
        return
    if resources.probe is None and resources.cluster is None:  # each host's were checked when it joined
        check_requested_workers(requested, machine)
        if fixed and requested.workers not in ("auto", fixed.workers):
            raise PlaitError(
                f"the launcher started {counted(fixed.workers, 'worker')}, and run.workers = {requested.workers}; "
                f"start {requested.workers} (torchrun: --nproc-per-node), or leave run.workers out"
            )
        if degrees:
            _check_degrees(requested, degrees, machine.cores)


def _check_degrees(requested: RequestedWorkers, degrees: Layout, cores: int) -> None:
    count, threads = degrees.world_size, requested.threads
    if requested.workers not in ("auto", count):
        raise PlaitError(
            f"the layout {degrees} needs {counted(count, 'worker')}, and run.workers = {requested.workers}; name "
            f"degrees whose product is {requested.workers}, or leave run.workers out"
        )
    if threads != "auto" and threads > max(1, cores // count):
        raise PlaitError(
            f"run.threads = {threads} for each of the layout's {counted(count, 'worker')} want {count * threads} "
            f"cores, and this machine has {cores}; choose at most {max(1, cores // count)}"
        )


def named_workers_lines(resources: Resources) -> list[str]:
    """What the recipe's workers and threads restrict, in sentences."""
    requested = resources.requested
    if not resources.is_here:
        keys = [f"run.{key}" for key in ("devices", "workers", "threads") if getattr(requested, key) != "auto"]
        verb = "changes" if len(keys) == 1 else "change"
        return [f"{' and '.join(keys)} {verb} nothing here: they are about real machines"] if keys else []
    machine, lines = resources.machine, list[str]()
    if requested.devices == "cpu":
        lines.append('on the processor: run.devices = "cpu"')
    elif machine.gpus:
        lines.append(f"only GPU {', '.join(map(str, machine.gpus))} of this machine (run.devices, run.workers)")
    if machine.device == "cpu" and requested.workers != "auto":
        lines.append(f"only layouts of {counted(requested.workers, 'worker')}: run.workers = {requested.workers}")
    if requested.threads != "auto":
        lines.append(f"{counted(requested.threads, 'thread')} for each worker: run.threads = {requested.threads}")
    return lines
