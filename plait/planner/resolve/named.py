"""What a recipe names, as the planner takes it: of [layout] degrees, a whole layout and constraints for the search, and
of [run] devices, workers and threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from plait.devices import DEVICE_TRAITS
from plait.errors import PlaitError
from plait.layout import AXES, Layout
from plait.machines.machine import Machine
from plait.machines.requested_workers import RequestedWorkers, check_requested_workers
from plait.model.shape import ModelShape
from plait.planner.derive.intervals import balance_every_steps
from plait.planner.derive.model_size import (
    GUESSED_PEAK_FLOPS,
    CorpusFacts,
    TrainingRate,
    batch_sequences,
    derive_run_size,
)
from plait.planner.derive.resources import Resources
from plait.planner.derive.training_job import batch_doubts
from plait.planner.search.enumeration import Constraints
from plait.planner.search.validity import balanced_stages, check_layout, check_shares
from plait.recipe.schema import RunConfig
from plait.units import counted

SCHEDULE_WITHOUT_PIPELINE = (
    'layout.schedule = "{schedule}" is the order of work in a pipeline, and [layout] names none; set layout.pipeline '
    "above 1, too, or leave the schedule out"
)
ROUNDED_SUMS = (
    'layout.shard_what = "master-weights" would add up the gradients of micro-batches in the bf16 of '
    'train.gradient_transfer; leave train.gradient_transfer out, or choose layout.shard_what = "optimizer"'
)


def named_degrees(config: RunConfig) -> Layout | None:
    """The degrees that the recipe names, as a layout of which only they count; None where it names none.

    As soon as one is named, those not named are 1.
    """
    requested = {axis: getattr(config.layout, axis) for axis in AXES}
    named = {axis: degree for axis, degree in requested.items() if degree != "auto"}
    if config.layout.expert != "auto" and config.layout.expert > 1 and not named:
        raise PlaitError(
            f"layout.expert = {config.layout.expert} shares out experts among workers; name layout.replicate, "
            "layout.shard or layout.context, too"
        )
    if config.layout.expert != "auto" and config.layout.expert > 1 and balance_every_steps(config, "alike"):
        raise PlaitError(
            "balance.every follows the workers' own times, and with layout.expert they wait for each other in each "
            'layer; write balance.every = "never"'
        )
    return Layout(**named) if named else None


def layout_of(config: RunConfig, shape: ModelShape, degrees: Layout) -> Layout:
    """The layout with these degrees and, for all else, what the recipe names or what is usual."""
    section = config.layout
    pipeline = degrees.pipeline
    virtual = 1 if section.virtual_stages == "auto" else section.virtual_stages
    if section.stage_layers != "auto":
        if section.virtual_stages != "auto" and len(section.stage_layers) != pipeline * virtual:
            raise PlaitError(
                f"layout.stage_layers names {len(section.stage_layers)} stages, and layout.virtual_stages = {virtual} "
                f"on {pipeline} pipeline workers are {pipeline * virtual}; leave one of the two out"
            )
        virtual = len(section.stage_layers) // pipeline
    schedule = section.schedule
    if schedule == "auto":
        schedule = "interleaved" if virtual > 1 else "1f1b"
    layers = section.stage_layers
    if layers == "auto":
        stages = pipeline * virtual
        layers = balanced_stages(shape, stages) if stages > 1 else ()
    return replace(
        degrees,
        expert=1 if section.expert == "auto" else section.expert,
        shard_what="optimizer" if section.shard_what == "auto" else section.shard_what,
        schedule=schedule,
        stage_layers=layers,
        recompute="none" if section.recompute == "auto" else section.recompute,
    )


def check_schedule(config: RunConfig, degrees: Layout) -> None:
    """Raise PlaitError for a named schedule where the degrees have no pipeline that it could order."""
    if config.layout.schedule != "auto" and degrees.pipeline == 1:
        raise PlaitError(SCHEDULE_WITHOUT_PIPELINE.format(schedule=config.layout.schedule))


def constraints_of(config: RunConfig, shape: ModelShape, batch_sequences: int) -> Constraints:
    """The parts of the layout that the recipe fixes; raises PlaitError if a named layout cannot carry the model and its
    batch.

    If a pipeline is named, so is its order: "auto" then means the default.
    """
    constraints = open_constraints(config)
    if config.layout.shard_what == "master-weights" and config.train.gradient_transfer == "bf16":
        raise PlaitError(ROUNDED_SUMS)
    if constraints.degrees:
        check_schedule(config, constraints.degrees)
    if not constraints.degrees and not constraints.stage_layers:
        return constraints
    layout = layout_of(config, shape, constraints.degrees or Layout())
    check_layout(layout, shape, sequence=shape.sequence, batch_sequences=batch_sequences)
    check_shares(constraints.shares, layout, batch_sequences)
    if layout.pipeline == 1:
        return constraints
    order = {"schedule": layout.schedule, "virtual": layout.virtual_stages}
    return replace(constraints, knobs={**constraints.knobs, **order})


def with_fixed_shapes(constraints: Constraints, machine: Machine, documents: Literal["mask", "join"]) -> Constraints:
    """On devices that compile operations for each shape, only layouts whose shapes are the same in each step. Raises
    PlaitError where the recipe names another."""
    if not DEVICE_TRAITS[machine.device].is_compiled:
        return constraints
    every = f"{machine.name} compiles operations for each shape, which takes seconds"
    expert = constraints.knobs.get("expert", 1)
    if expert != 1:
        raise PlaitError(
            f"{every}, and how many tokens layout.expert = {expert} sends from worker to worker changes in each step; "
            "leave layout.expert out"
        )
    if constraints.degrees and constraints.degrees.context > 1 and documents == "mask":
        raise PlaitError(
            f"{every}, and layout.context = {constraints.degrees.context} cuts documents into pieces of other lengths "
            "in each step; write data.mask_documents = false, or leave layout.context out"
        )
    return replace(constraints, knobs={**constraints.knobs, "expert": 1})


def refuse_unfit_names(config: RunConfig, corpus: CorpusFacts) -> None:
    """Raise PlaitError where model, batch and layout do not fit each other, as far as the recipe names them: known
    before any machine is measured."""
    batch_doubts(config, corpus)
    model = config.model
    if corpus.base is None and model.size == "auto" and "auto" in (model.layers, model.width):
        return
    unmeasured = TrainingRate(flops_per_s=GUESSED_PEAK_FLOPS, source="assumed")
    size = derive_run_size(config, corpus, unmeasured).value
    if config.train.batch_tokens != "auto":
        constraints_of(config, size.shape, batch_sequences(config, size).value)


def open_constraints(config: RunConfig) -> Constraints:
    """The values in the recipe's [layout], unchecked and without consequences."""
    section = config.layout
    named = {
        "virtual": section.virtual_stages,
        "schedule": section.schedule,
        "recompute": section.recompute,
        "shard_what": section.shard_what,
        "micro_sequences": section.micro_sequences,
        "expert": section.expert,
    }
    return Constraints(
        degrees=named_degrees(config),
        knobs={knob: value for knob, value in named.items() if value != "auto"},
        stage_layers=() if section.stage_layers == "auto" else section.stage_layers,
        shares=() if section.shares == "auto" else section.shares,
    )


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
    """The restrictions from the recipe's workers and threads, in sentences."""
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
