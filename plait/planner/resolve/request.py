"""The request: everything that the search for a layout depends on, made in one place for every command.

`plait plan`, `plait train` and Python all go recipe + resources -> Request -> search -> Plan. Two entry points that are
given the same recipe, text and machines therefore build equal requests, and get equal plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from plait.devices import DEVICE_TRAITS
from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.cluster import Cluster
from plait.machines.machine import Machine
from plait.partition.execution import RunArithmetic
from plait.planner.calibration.factors import ForecastBasis
from plait.planner.derive.arithmetic import arithmetic_name
from plait.planner.derive.derived import Derived
from plait.planner.derive.intervals import balance_every_steps
from plait.planner.derive.model_size import CorpusFacts, TrainingRate
from plait.planner.derive.resources import STAND_IN, ProbeNeed, Resources
from plait.planner.derive.training_job import (
    SizedJob,
    arithmetic_of_plan,
    compile_of,
    rate_before_pricing,
    run_arithmetic,
    size_job,
    workload_of_job,
)
from plait.planner.plan import Plan, TrainingJob
from plait.planner.problem.software_profile import PLAIT_PROFILE, SoftwareProfile
from plait.planner.problem.workload import Workload
from plait.planner.resolve.named import (
    check_named_workers,
    constraints_of,
    named_workers_lines,
    with_fixed_shapes,
    with_named_workers,
)
from plait.planner.search.enumeration import Constraints
from plait.planner.search.found import LeftOut
from plait.planner.search.validity import check_devices
from plait.planner.step_time.device_time import was_measured
from plait.recipe.schema import RunConfig
from plait.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOption:
    """One way to divide the machines into workers."""

    cluster: Cluster
    """The workers as the devices of a cluster."""
    threads: int
    """Threads of each worker."""
    devices: Literal["all", "some"] = "all"
    """Whether a layout must use all of them, or may leave some out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A training job, the constraints on its layout, and the machines and software that may run it."""

    job: TrainingJob
    arithmetic: RunArithmetic
    workload: Workload
    """The job as the cost model sees it."""
    constraints: Constraints
    options: tuple[WorkerOption, ...]
    """The ways to use the machines, fewest workers first; several only on processors."""
    open_options: tuple[WorkerOption, ...]
    """`options` if the recipe named no degrees."""
    profile: SoftwareProfile
    """plait's own software profile, with the factors that earlier runs on these machines taught."""
    basis: ForecastBasis
    """Whether times come from formulas or from a probe's clock."""
    shares_may_change: bool
    """Whether unequal shares of the batch may be changed while the run goes on."""
    has_forecast: bool
    """Whether the planner knows what the devices can do; else they were laid out as STAND_IN."""
    notes: tuple[str, ...]
    """Derived values, each with its reason."""
    training_notes: tuple[str, ...]
    """Notes on the optimizer and the documents."""
    warnings: tuple[str, ...]
    """Warnings that are always shown before a run."""
    part_of: LeftOut | None = None
    """If the options are only the cluster's nodes with bf16: all of its nodes, in float32."""


def request_of(
    config: RunConfig,
    corpus: CorpusFacts,
    resources: Resources,
    begun: Plan | SizedJob | None = None,
    rate: TrainingRate | None = None,
) -> Request:
    """The request of a recipe on these machines; probes several hosts. Raises PlaitError for what cannot work.

    Of a run that is `begun` only the layout is open: the job is as its plan says. A job that was sized before is taken
    as it is, unless these machines train at another rate and its budget is a time. `rate` is what the forecast of a
    layout gave; None where none was priced yet.
    """
    resources = with_named_workers(config, resources)
    if isinstance(begun, Plan):
        job, chosen = replace(begun.job, corpus=corpus.folder), Derived(value=arithmetic_of_plan(begun, resources))
        reasons, training_reasons, warnings = (), (), ()
    else:
        rate = rate or rate_before_pricing(resources)
        sized = begun if begun and begun.holds_at(rate) else size_job(config, corpus, rate)
        job, chosen = sized.job, run_arithmetic(config, sized.job.optimizer.kind, resources)
        doubts = [one for one in (_untried(resources.machine), resources.peak_doubt) if one]
        reasons, training_reasons, warnings = sized.reasons, sized.training_reasons, (*doubts, *sized.warnings)
    constraints = constraints_of(config, job.shape, job.batch_sequences)
    constraints = with_fixed_shapes(constraints, resources.machine, job.documents)
    check_named_workers(resources, constraints.degrees)
    compiled = compile_of(config, resources.machines)
    notes = [*reasons, *chosen.reasons, *named_workers_lines(resources), *compiled.reasons]
    arithmetic = replace(chosen.value, compile=compiled.value)
    resources = resources.probed(
        ProbeNeed(
            shape=job.shape,
            batch_sequences=job.batch_sequences,
            precision=arithmetic.precision,
            matmul_backend=arithmetic.matmul_backend,
            host_backends=arithmetic.host_backends,
            compile=arithmetic.compile,
        )
    )
    workload = workload_of_job(job, arithmetic, resources, config.finetune.objective)
    uncompiled = resources.machine.has_accelerators and arithmetic.compile == "off"
    program = PLAIT_PROFILE.uncompiled if uncompiled else PLAIT_PROFILE
    basis: ForecastBasis = "clock" if resources.cluster and was_measured(workload, resources.cluster) else "formulas"
    # Steps with TF32 products, or by another library, say nothing about steps without.
    name = arithmetic_name(arithmetic.product_precision, arithmetic.matmul_backend)
    calibration = resources.load_calibration(name, basis)
    if not resources.has_known_devices:
        notes.append(f"{resources.machine.name} is not in plait's catalogue: laid out as an {STAND_IN} with its memory")
    counts = resources.worker_counts()
    if constraints.degrees:
        count = _named_count(resources, constraints.degrees)
        counts, notes = [count.value], [*notes, *count.reasons]
    return Request(
        job=job,
        arithmetic=arithmetic,
        workload=workload,
        constraints=constraints,
        options=_options(config, resources, counts),
        open_options=_options(config, resources, resources.worker_counts()),
        profile=replace(
            program,
            calibration=calibration,
            gradient_transfer=config.train.gradient_transfer,
            stage_transfer=config.train.stage_transfer,
        ),
        basis=basis,
        shares_may_change=balance_every_steps(config, "unequal") > 0,
        has_forecast=resources.has_known_devices,
        notes=tuple(notes),
        training_notes=training_reasons,
        warnings=(*warnings, *compiled.warnings),
    )


def _untried(machine: Machine) -> str:
    """A remark on devices that plait supports but has not run on; empty for others."""
    proof = DEVICE_TRAITS[machine.device].proof
    if proof == "tested":
        return ""
    if proof == "run without a chip":
        return (
            f"plait has not run on a {machine.name}, only on its maker's backend for torch on a processor: compare the "
            'first losses with a run on run.devices = "cpu", and please report the result'
        )
    return (
        f'plait has not been run on GPUs like {machine.name} (torch\'s "{machine.device}"): compare the first losses '
        'with a run on run.devices = "cpu", and please report the result'
    )


def _options(config: RunConfig, resources: Resources, counts: Sequence[int]) -> tuple[WorkerOption, ...]:
    """The machines divided into each of these numbers of workers."""
    devices = "some" if resources.may_leave_devices_out and config.layout.devices == "auto" else "all"
    return tuple(
        WorkerOption(cluster=resources.as_cluster(n), threads=resources.threads(n), devices=devices) for n in counts
    )


def _named_count(resources: Resources, named: Layout) -> Derived[int]:
    machine, fixed, count = resources.machine, resources.fixed_workers, named.world_size
    if fixed and fixed.workers != count:
        raise PlaitError(
            f"the launcher started {counted(fixed.workers, 'worker')} and the layout needs {count}; "
            f"start {count} (torchrun: --nproc-per-node)"
        )
    if not fixed and resources.is_here:
        check_devices(named, machine)
        if machine.device == "cpu" and count > machine.cores:
            turns = (
                f"{counted(count, 'worker')} on {counted(machine.cores, 'core')}: as asked, though they will take turns"
            )
            return Derived(value=count, reasons=(turns,))
    return Derived(value=count)
