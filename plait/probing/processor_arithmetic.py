"""Chooses by measurement how processors multiply: the library of float32 products, and float32 or bf16. What was
measured is kept for similar models; what there is no time to measure is not chosen: torch's own library, float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from math import inf
from statistics import median
from typing import Any, Literal

from plait.errors import OutOfTime, RunFailed
from plait.launch.values.job import Job
from plait.machines.machine import Machine
from plait.machines.measured import ProductRates
from plait.partition.execution import MatmulBackend, Precision
from plait.planner.derive.arithmetic import (
    BackendName,
    PrecisionChoice,
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
from plait.probing.kept import KeptFactor, KeptRates, KeptTimings, keep_timings, load_timings, nearest
from plait.probing.measuring_time import UNLIMITED, MeasuringTime
from plait.probing.request import ProbedModel
from plait.probing.steps import ARITHMETIC_S, StepKey, kind_of, sizes_of, time_plan
from plait.recipe.schema import RunConfig
from plait.workers import PRODUCTS_ENTRY, WorkerPool, ask_rank_0

LEAST_RUN_S = 10.0
"""A shorter run gains less in bf16 than finding out takes."""
LONG_RUN_S, ROUNDS, SHORT_ROUNDS, SHORT_ROUND_S = 60.0, 3, 1, 0.3
"""A run as long as this is worth ROUNDS of timing steps in both precisions; a shorter one SHORT_ROUNDS, with at least
SHORT_ROUND_S of steps in each."""
MOST_WORKERS = 8
"""Workers that are measured side by side, where their number is not given."""
MOST_TOKENS = 512
"""Rows of the largest products that are measured: more change a processor's rate by little, and take longer."""
TIMING_PRODUCTS, TIMING_PRECISIONS = "timing matrix products", "timing steps in float32 and bf16"
"""Shown to the user meanwhile."""
RatesFreshness = Literal["kept", "again"]
"""Whether rates that were measured before on such a processor, with this software, are used again."""
RunProcessors = Literal["same", "other"]
"""Whether a begun run is on the processors that its plan was made for."""
MakeDraft = Callable[[Resources], Draft]


def new_with_arithmetic(
    config: RunConfig,
    job: TrainingJob,
    resources: Resources,
    workers: WorkerPool,
    *,
    rates: RatesFreshness,
    limit: MeasuringTime = UNLIMITED,
) -> Resources:
    """The resources of a new run, with the library that suits its processors best; GPUs have none to choose. Raises
    OutOfTime where nothing is known of the processors and there is no time to measure them."""
    if resources.machine.device != "cpu":
        return resources
    named = config.train.matmul_backend == "onednn" or config.train.precision == "bf16"
    needed = UNLIMITED if named else limit  # whether the processor has what was named, and how exact it is
    found = _measured_products(_products_of(job), resources, workers, rates, needed)
    return _with_backends(config.train.matmul_backend, precision_of(config, resources).value, resources, found)


def arithmetic_to_probe(
    named: BackendName, precision: Precision, model: ProbedModel, resources: Resources, workers: WorkerPool
) -> ProcessorArithmetic | None:
    """The library that a run of such a model would take on these processors, so that a probe times its arithmetic and
    not another's; None for GPUs, which have none to choose."""
    if resources.machine.device != "cpu":
        return None
    fewer = replace(model, sequences=min(model.sequences, max(1, MOST_TOKENS // model.sequence)))
    return choose_backends(named, precision, _measured_products(fewer, resources, workers, "kept", UNLIMITED))


def draft_in_best_precision(
    config: RunConfig,
    drafted: Draft,
    split: WorkerLayout,
    resources: Resources,
    workers: WorkerPool,
    make_draft: MakeDraft,
    *,
    rates: RatesFreshness = "kept",
    limit: MeasuringTime = UNLIMITED,
) -> Draft:
    """A new run's draft with the reason for its precision, or another draft in a precision in which steps of the layout
    `split` are much faster on its processors. Raises OutOfTime where that is not known and there is no time for it."""
    found = resources.arithmetic
    if config.train.precision != "auto" or found is None:
        return drafted
    plan = with_layout(drafted.plan, split)
    choice = _precision(config, plan, found, resources, workers, rates, limit)
    if choice.precision == found.precision:  # a second draft would probe several hosts again
        return replace(drafted, plan=replace(drafted.plan, reasons=(*drafted.plan.reasons, choice.reason)))
    return make_draft(resources.with_arithmetic(found.with_precision(choice)))


def begun_with_arithmetic(
    config: RunConfig,
    plan: Plan,
    resources: Resources,
    workers: WorkerPool,
    *,
    processors: RunProcessors,
    rates: RatesFreshness = "kept",
    limit: MeasuringTime = UNLIMITED,
) -> Resources:
    """The resources of a begun run: its precision stays, and the library unless it came to other processors or the
    recipe names one. Raises OutOfTime as `new_with_arithmetic` does."""
    if resources.machine.device != "cpu":
        return resources
    named = config.train.matmul_backend
    kept = plan.arithmetic.matmul_backend if named == "auto" and processors == "same" else named
    found = _measured_products(_products_of(plan.job), resources, workers, rates, limit)
    return _with_backends(kept, plan.arithmetic.precision, resources, found)


def library_of_newcomer(
    config: RunConfig, plan: Plan, machine: Machine, workers: WorkerPool, limit: MeasuringTime
) -> MatmulBackend:
    """The library that a begun run would take on a host that waits to join it, and whose `workers` these are. Raises
    OutOfTime where the time is up, PlaitError where the recipe names one that this host does not have."""
    kept, digest, named = plan.arithmetic, machine.digest(), config.train.matmul_backend
    is_first = bool(plan.machines.hosts) and plan.machines.hosts[0].machine == digest
    if machine.device != "cpu" or is_first or digest in kept.host_backends:
        return kept.host_backends.get(digest, kept.matmul_backend)
    here = Resources(machine=machine, peak_flops=None, fixed_workers=workers.fixed_workers)
    return choose_backends(
        named, kept.precision, _measured_products(_products_of(plan.job), here, workers, "kept", limit)
    ).backend


def _with_backends(
    named: BackendName, precision: Precision, resources: Resources, measured: Sequence[ProductRates]
) -> Resources:
    """The resources with the library chosen for each processor, and the price of bf16 where that is settled."""
    found = choose_backends(named, precision, measured)
    if precision == "bf16":
        found = found.with_precision(PrecisionChoice(precision="bf16", reason=bf16_price(found.bf16_gain)))
    return resources.with_arithmetic(found)


def _products_of(job: TrainingJob) -> ProbedModel:
    """The job's model, with as many sequences as its largest measured products have."""
    most = min(job.batch_sequences, max(1, MOST_TOKENS // job.shape.sequence))
    return ProbedModel(shape=job.shape, sequence=job.shape.sequence, sequences=most)


def _measured_products(
    model: ProbedModel, resources: Resources, workers: WorkerPool, rates: RatesFreshness, limit: MeasuringTime
) -> Sequence[ProductRates]:
    """Speed and error of a model's products on each worker: those given, else one a core. Kept for this and similar
    models on this machine; over several hosts, or where somebody else started the workers, they are measured each time.

    Of a worker with one thread processor time is measured, which other programs do not lengthen.
    """
    given = resources.fixed_workers or FixedWorkers(workers=min(resources.machine.cores, MOST_WORKERS), threads=1)
    name, sizes = f"{kind_of(model.shape)}, {given.workers} × {given.threads}", sizes_of(model.shape, model.tokens)
    is_kept = not resources.fixed_workers and not resources.probe
    kept = load_timings(workers.working_folder, resources.machine).rates if is_kept and rates == "kept" else ()
    if known := nearest(kept, name, sizes):
        return known.ranks
    measuring = Job(
        entry=PRODUCTS_ENTRY,
        argument=json.dumps(asdict(model)),
        world_size=given.workers,
        threads=given.threads,
        at_stop="abandon",
    )
    found = tuple(_rates_from(ask_rank_0(workers, limit.limited(measuring), "products")))
    if is_kept:
        entry = KeptRates(name=name, sizes=sizes, ranks=found)
        keep_timings(workers.working_folder, resources.machine, rates=[entry])
    return found


def _rates_from(answer: Mapping[str, Any]) -> Sequence[ProductRates]:
    try:
        return [ProductRates.from_values(values) for values in answer["ranks"]]
    except ValueError:
        raise RunFailed(
            "a host reported speeds of matrix products that cannot be; install the same commit of plait on all hosts"
        ) from None


def _precision(
    config: RunConfig,
    plan: Plan,
    found: ProcessorArithmetic,
    resources: Resources,
    workers: WorkerPool,
    rates: RatesFreshness,
    limit: MeasuringTime,
) -> PrecisionChoice:
    """The precision for a run's processors, with the reason: bf16 where a whole step is much faster, now or in an
    earlier run."""
    if refusal := bf16_refusal(found.bf16_gain):
        return PrecisionChoice(precision="float32", reason=refusal)
    key = StepKey.of(plan)
    is_kept = not resources.fixed_workers and not resources.probe  # a gain over hosts says nothing about one of them
    timings = load_timings(workers.working_folder, resources.machine) if is_kept else KeptTimings()
    known = nearest(timings.factors, key.bf16_name, key.sizes)
    if known is not None and rates == "kept":
        return choose_precision(known.value, "as timed here before")
    expected_s = _expected_s(plan)
    if expected_s < LEAST_RUN_S:
        too_short = "precision float32: the run is too short to time steps in bf16 as well"
        return PrecisionChoice(precision="float32", reason=too_short)
    gain = _timed_gain(config, plan, workers, limit, "long" if expected_s >= LONG_RUN_S else "short")
    kept = KeptFactor(name=key.bf16_name, sizes=key.sizes, value=gain)
    if is_kept:
        keep_timings(workers.working_folder, resources.machine, factors=[kept])
    return choose_precision(gain, "as timed here")


def _expected_s(plan: Plan) -> float:
    """About how long a run will take; as good as for ever where there is no forecast."""
    if plan.job.budget.unit != "seconds":
        return plan.job.steps * plan.forecast.step_s if plan.forecast else LONG_RUN_S
    most = plan.job.most_tokens
    learnt_s = most / plan.batch_tokens * plan.forecast.step_s if most and plan.forecast else inf
    return min(plan.job.budget.value, learnt_s)


def _timed_gain(
    config: RunConfig, plan: Plan, workers: WorkerPool, limit: MeasuringTime, run: Literal["long", "short"]
) -> float:
    """How many times as fast a step is in bf16: the median of rounds in which both are timed one after the other, so
    that another program's work spoils one round and not the answer. Raises OutOfTime where no round was completed."""
    both = (
        replace(plan, arithmetic=replace(plan.arithmetic, precision="float32")),
        replace(plan, arithmetic=replace(plan.arithmetic, precision="bf16")),
    )
    count, least_s = (ROUNDS, ARITHMETIC_S) if run == "long" else (SHORT_ROUNDS, SHORT_ROUND_S)
    gains: list[float] = []
    for number in range(count):
        part = limit.part(1 / (count - number))
        try:
            single = time_plan(config, both[0], workers, least_s=least_s, limit=part.part(0.5))
            half = time_plan(config, both[1], workers, least_s=least_s, limit=part)
            gains.append(single.step_s / half.step_s)
        except OutOfTime:
            if not gains:
                raise
            break
    return median(gains)
