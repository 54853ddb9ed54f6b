"""Chooses by measurement how processors multiply: the library of float32 products, and float32 or bf16."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from plait.errors import RunFailed
from plait.launch.values.job import Job
from plait.machines.measured import ProductRates
from plait.partition.execution import Precision
from plait.planner.derive.arithmetic import (
    BackendName,
    ProcessorArithmetic,
    bf16_price,
    bf16_refusal,
    choose_backends,
    choose_precision,
)
from plait.planner.derive.resources import FixedWorkers, Resources
from plait.planner.derive.training_job import precision_of
from plait.planner.plan import Plan, TrainingJob
from plait.planner.resolve.resolve import Draft, with_layout
from plait.planner.resolve.worker_layouts import WorkerLayout
from plait.probing.kept_rates import keep_rates, kept_rates, rates_path
from plait.probing.request import ProbedModel
from plait.probing.steps import ARITHMETIC_S, time_plan
from plait.recipe.schema import RunConfig
from plait.workers import PRODUCTS_ENTRY, WorkerPool, ask_rank_0
from plait.working_folder import WorkingFolder

LEAST_RUN_S = 60.0
"""A run must last so long that timing a step in both precisions, some ten seconds, is worth it."""
ROUNDS = 3
MOST_WORKERS = 8
"""Workers that are measured side by side, where their number is not given."""
MOST_TOKENS = 512
"""Rows of the largest products that are measured: more change a processor's rate by little, and take longer."""
TIMING_PRODUCTS = "timing matrix products"
"""What a person reads while this goes on."""
RatesFreshness = Literal["kept", "again"]
"""Whether rates that were measured before on such a processor, with this software, are used again."""
RunProcessors = Literal["same", "other"]
"""Whether a begun run is on the processors that its plan was made for."""
MakeDraft = Callable[[Resources], Draft]


def new_with_arithmetic(
    config: RunConfig, job: TrainingJob, resources: Resources, workers: WorkerPool, *, rates: RatesFreshness
) -> Resources:
    """The resources of a new run, with the library that suits its processors best; GPUs have none to choose."""
    if resources.machine.device != "cpu":
        return resources
    found = _measured_products(_products_of(job), resources, workers, rates)
    return _with_backends(config.train.matmul_backend, precision_of(config, resources).value, resources, found)


def arithmetic_to_probe(
    named: BackendName, precision: Precision, model: ProbedModel, resources: Resources, workers: WorkerPool
) -> ProcessorArithmetic | None:
    """The library that a run of such a model would take on these processors, so that a probe times its arithmetic and
    not another's; None for GPUs, which have none to choose."""
    if resources.machine.device != "cpu":
        return None
    fewer = replace(model, sequences=min(model.sequences, max(1, MOST_TOKENS // model.sequence)))
    return choose_backends(named, precision, _measured_products(fewer, resources, workers, "kept"))


def draft_in_best_precision(
    config: RunConfig,
    drafted: Draft,
    split: WorkerLayout,
    resources: Resources,
    workers: WorkerPool,
    make_draft: MakeDraft,
) -> Draft:
    """A new run's draft with the reason for its precision, or another draft in a precision in which steps of the layout
    `split` are much faster on its processors."""
    found = resources.arithmetic
    if config.train.precision != "auto" or found is None:
        return drafted
    precision, reason = _precision(config, with_layout(drafted.plan, split), found, workers)
    if precision == found.precision:  # a second draft would probe several hosts again
        return replace(drafted, plan=replace(drafted.plan, reasons=(*drafted.plan.reasons, reason)))
    return make_draft(resources.with_arithmetic(found.with_precision(precision, reason)))


def begun_with_arithmetic(
    config: RunConfig, plan: Plan, resources: Resources, workers: WorkerPool, *, processors: RunProcessors
) -> Resources:
    """The resources of a begun run: its precision stays, and the library unless it came to other processors or the
    recipe names one."""
    if resources.machine.device != "cpu":
        return resources
    named = config.train.matmul_backend
    kept = plan.arithmetic.matmul_backend if named == "auto" and processors == "same" else named
    found = _measured_products(_products_of(plan.job), resources, workers, "kept")
    return _with_backends(kept, plan.arithmetic.precision, resources, found)


def _with_backends(
    named: BackendName, precision: Precision, resources: Resources, measured: Sequence[ProductRates]
) -> Resources:
    """The resources with the library chosen for each processor, and the price of bf16 where that is settled."""
    found = choose_backends(named, precision, measured)
    if precision == "bf16":
        found = found.with_precision("bf16", bf16_price(found.bf16_gain))
    return resources.with_arithmetic(found)


def _products_of(job: TrainingJob) -> ProbedModel:
    """The job's model, with as many sequences as its largest measured products have."""
    most = min(job.batch_sequences, max(1, MOST_TOKENS // job.shape.sequence))
    return ProbedModel(shape=job.shape, sequence=job.shape.sequence, sequences=most)


def _measured_products(
    model: ProbedModel, resources: Resources, workers: WorkerPool, rates: RatesFreshness
) -> Sequence[ProductRates]:
    """Speed and error of a model's products on each worker: those given, else one a core. Kept for the next plan on
    this machine; over several hosts, or where somebody else started the workers, they are measured each time.

    Of a worker with one thread processor time is measured, which other programs do not lengthen.
    """
    given = resources.fixed_workers or FixedWorkers(workers=min(resources.machine.cores, MOST_WORKERS), threads=1)
    measuring = Job(
        entry=PRODUCTS_ENTRY,
        argument=json.dumps(asdict(model)),
        world_size=given.workers,
        threads=given.threads,
        at_stop="abandon",
    )
    if resources.fixed_workers or resources.probe:
        return _rates_from(ask_rank_0(workers, measuring, "products"))
    path = _rates_path(resources, measuring, workers.working_folder)
    if rates == "kept" and (known := kept_rates(path)):
        return known
    found = _rates_from(ask_rank_0(workers, measuring, "products"))
    keep_rates(path, found)
    return found


def _rates_path(resources: Resources, measuring: Job, working: WorkingFolder) -> Path:
    """Where the rates of a machine's processor are kept, for its software and these products."""
    given = [measuring.argument, measuring.world_size, measuring.threads]
    return rates_path(working, resources.machine, given)


def _rates_from(answer: Mapping[str, Any]) -> Sequence[ProductRates]:
    try:
        return [ProductRates.from_values(values) for values in answer["ranks"]]
    except ValueError:
        raise RunFailed(
            "a host reported speeds of matrix products that cannot be; install the same commit of plait on all hosts"
        ) from None


def _precision(config: RunConfig, plan: Plan, found: ProcessorArithmetic, workers: WorkerPool) -> tuple[Precision, str]:
    """The precision for a run's processors, with the reason: bf16 where a whole step is much faster."""
    if refusal := bf16_refusal(found.bf16_gain):
        return "float32", refusal
    if _expected_s(plan) < LEAST_RUN_S:
        return "float32", "precision float32: the run is too short to time steps in bf16 as well"
    return choose_precision(_timed_gain(config, plan, workers))


def _expected_s(plan: Plan) -> float:
    """About how long a run will take; as good as for ever where there is no forecast."""
    if plan.job.budget.unit == "seconds":
        return plan.job.budget.value
    return plan.job.steps * plan.forecast.step_s if plan.forecast else LEAST_RUN_S


def _timed_gain(config: RunConfig, plan: Plan, workers: WorkerPool) -> float:
    """How many times as fast a step is in bf16: the median of rounds in which both are timed one after the other, so
    that another program's work spoils one round and not the answer."""
    both = (
        replace(plan, arithmetic=replace(plan.arithmetic, precision="float32")),
        replace(plan, arithmetic=replace(plan.arithmetic, precision="bf16")),
    )
    rounds = [[time_plan(config, one, workers, least_s=ARITHMETIC_S) for one in both] for _ in range(ROUNDS)]
    return median(single / half for single, half in rounds)
