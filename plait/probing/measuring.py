"""What is measured on the machine before a plan is made: the machine itself, and whole steps of a layout."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from plait.errors import PlaitError
from plait.launch.values.job import Job, Message
from plait.machines.cluster import Cluster
from plait.machines.machine import Machine, usable_cores
from plait.machines.requested_workers import ANY_WORKERS, PeakNeed, RequestedWorkers, SurveyRequest
from plait.planner.derive.resources import Probe, Resources, on_paper
from plait.planner.plan import Plan
from plait.planner.plan_file import write_plan
from plait.planner.resolve.resolve import with_layout
from plait.planner.resolve.worker_layouts import WorkerLayout
from plait.private_folder import job_folder
from plait.probing.calibration_store import calibration_key, load_calibration, read_expert_load
from plait.recipe.load import recipe_text
from plait.recipe.schema import RunConfig
from plait.screen.screen import ShowProgress, ignore_progress
from plait.workers import MEASURE_ENTRY, TIMING_ENTRY, WorkerPool, modules_needed
from plait.working_folder import WorkingFolder

PROGRESS = "progress"
"""Kind of the message by which rank 0 of a job says how far it is, with the arguments of a ShowProgress."""
LAYOUT_S, ARITHMETIC_S = 4.0, 1.5
"""Least seconds of timed steps: to choose among layouts, or in each round between two precisions."""
LONGEST_TIMED_STEP_S = 4.0
"""A step that takes longer by forecast is timed with fewer micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSurvey:
    """The machine that a run finds, and the arithmetic peak that MFU is a share of."""

    machine: Machine
    peak_flops: float | None
    peak_doubt: str = ""
    """What makes the peak doubtful, in a sentence; empty where nothing does."""
    others: tuple[Machine, ...] = ()
    """The machines of the run's other hosts."""
    probe: Probe | None = None
    """Measures all hosts and the links between them."""


def survey_machine(
    workers: WorkerPool, requested: RequestedWorkers = ANY_WORKERS, peak: PeakNeed = "measured"
) -> MachineSurvey:
    """Describe this machine with the requested devices and measure its arithmetic peak, in a worker that uses all
    cores."""
    argument = SurveyRequest(requested=requested, peak=peak).to_json()
    job = Job(entry=MEASURE_ENTRY, argument=argument, world_size=1, threads=usable_cores(), at_stop="abandon")
    found = ask_rank_0(workers, job, "machine")
    machine = Machine.from_fingerprint(found["fingerprint"])
    return MachineSurvey(machine=machine, peak_flops=found["peak_flops"], peak_doubt=found["peak_doubt"])


def resources_of(site: MachineSurvey, workers: WorkerPool) -> Resources:
    """The surveyed machines and their workers as the planner's Resources."""
    machines, working = (site.machine, *site.others), workers.working_folder
    return Resources(
        machine=site.machine,
        peak_flops=site.peak_flops,
        others=site.others,
        peak_doubt=site.peak_doubt,
        fixed_workers=workers.fixed_workers,
        probe=site.probe,
        load_calibration=lambda precision, basis: load_calibration(
            calibration_key(machines, precision, basis), working
        ),
        load_expert_load=lambda mixture: read_expert_load(mixture, working),
    )


def resources_on_paper(cluster: Cluster, working: WorkingFolder) -> Resources:
    """A cluster that need not be there; of what runs here measured, what holds on any machine."""
    return on_paper(cluster, load_expert_load=lambda mixture: read_expert_load(mixture, working))


def measure(
    config: RunConfig,
    plan: Plan,
    workers: WorkerPool,
    layouts: tuple[WorkerLayout, ...],
    show: ShowProgress = ignore_progress,
) -> list[WorkerLayout]:
    """Time real steps of each layout."""
    measured = []
    for number, split in enumerate(layouts):
        show(number, len(layouts), f"timing steps of layout {number + 1} of {len(layouts)}")
        step_s = time_plan(config, with_layout(plan, split), workers, least_s=LAYOUT_S)
        measured.append(replace(split, step_s=step_s))
    return measured


def time_plan(config: RunConfig, plan: Plan, workers: WorkerPool, *, least_s: float) -> float:
    """Median seconds of a plan's steps, of which at least `least_s` are timed.

    A step with very many micro-batches is timed with a few and with half as many: all others take what the difference
    took, and what a step does once is in both.
    """
    few = micro_batches_to_time(plan)
    if few is None:
        return _time_steps(config, plan, workers, least_s)
    of_one = plan.layout.data_parallel_degree * plan.micro_sequences
    more_s, less_s = (
        _time_steps(config, replace(plan, batch_sequences=of_one * count), workers, least_s)
        for count in (few, few // 2)
    )
    each_s = max(0.0, more_s - less_s) / (few - few // 2)
    return more_s + (plan.batch_sequences / of_one - few) * each_s


def micro_batches_to_time(plan: Plan) -> int | None:
    """How many micro-batches of each data-parallel rank's are timed; None where a whole step is."""
    if plan.forecast is None or plan.forecast.step_s <= LONGEST_TIMED_STEP_S or plan.shares:
        return None
    there = plan.batch_sequences // (plan.layout.data_parallel_degree * plan.micro_sequences)
    rounds = int(there * LONGEST_TIMED_STEP_S / plan.forecast.step_s) // (2 * plan.layout.pipeline)
    few = 2 * plan.layout.pipeline * max(2, rounds)  # half of them, too, go through a pipeline in whole rounds
    return few if 4 * few <= there else None  # else it spares little, and the difference is amplified noise


def _time_steps(config: RunConfig, plan: Plan, workers: WorkerPool, least_s: float) -> float:
    with job_folder("plait-measure-") as folder:
        write_plan(plan, folder / "plan.json")
        (folder / "recipe.toml").write_text(recipe_text(config))
        job = Job(
            entry=TIMING_ENTRY,
            argument=json.dumps({"folder": str(folder), "least_s": least_s}),
            world_size=plan.world_size,
            threads=plan.threads,
            log_dir=str(folder),
            needs=modules_needed(plan),
            at_stop="abandon",
        )
        return ask_rank_0(workers, job, "measured")["step_s"]


def ask_rank_0(workers: WorkerPool, job: Job, kind: str, show: ShowProgress = ignore_progress) -> dict[str, Any]:
    """Run a job whose rank 0 sends one message of this kind, and return its values; raises Interrupted where a
    signal came. `show` gets the job's progress where rank 0 tells it."""
    answers: list[Message] = []

    def collect(message: Message) -> None:
        if message.kind == PROGRESS:
            show(*(message.values[key] for key in ("done", "total", "stage")))
        if message.kind == kind:
            answers.append(message)

    result = workers.run(job, collect)
    result.require_finished()
    if not answers:
        raise PlaitError(f"a worker ended without an answer ({job.entry}); this is a bug in plait, please report it")
    return dict(answers[0].values)
