"""Times whole steps of a plan's layouts, by the loop that trains."""

from __future__ import annotations

import json
from dataclasses import replace

from plait.launch.values.job import Job
from plait.planner.plan import Plan
from plait.planner.plan_file import write_plan
from plait.planner.resolve.resolve import with_layout
from plait.planner.resolve.worker_layouts import WorkerLayout
from plait.private_folder import job_folder
from plait.recipe.load import recipe_text
from plait.recipe.schema import RunConfig
from plait.screen.screen import ShowProgress, ignore_progress
from plait.workers import TIMING_ENTRY, WorkerPool, ask_rank_0, modules_needed

LAYOUT_S, ARITHMETIC_S = 4.0, 1.5
"""Least seconds of timed steps: to choose among layouts, or in each round between two precisions."""
LONGEST_TIMED_STEP_S = 4.0
"""A step that takes longer by forecast is timed with fewer micro-batches."""


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
    of_one = plan.placement.layout.data_parallel_degree * plan.placement.micro_sequences
    more_s, less_s = (
        _time_steps(config, replace(plan, job=replace(plan.job, batch_sequences=of_one * count)), workers, least_s)
        for count in (few, few // 2)
    )
    each_s = max(0.0, more_s - less_s) / (few - few // 2)
    return more_s + (plan.job.batch_sequences / of_one - few) * each_s


def micro_batches_to_time(plan: Plan) -> int | None:
    """How many micro-batches of each data-parallel rank's are timed; None where a whole step is."""
    if plan.forecast is None or plan.forecast.step_s <= LONGEST_TIMED_STEP_S or plan.placement.shares:
        return None
    there = plan.job.batch_sequences // (plan.placement.layout.data_parallel_degree * plan.placement.micro_sequences)
    rounds = int(there * LONGEST_TIMED_STEP_S / plan.forecast.step_s) // (2 * plan.placement.layout.pipeline)
    few = (
        2 * plan.placement.layout.pipeline * max(2, rounds)
    )  # half of them, too, go through a pipeline in whole rounds
    return few if 4 * few <= there else None  # else it spares little, and the difference is amplified noise


def _time_steps(config: RunConfig, plan: Plan, workers: WorkerPool, least_s: float) -> float:
    with job_folder("plait-measure-") as folder:
        write_plan(plan, folder / "plan.json")
        (folder / "recipe.toml").write_text(recipe_text(config))
        job = Job(
            entry=TIMING_ENTRY,
            argument=json.dumps({"folder": str(folder), "least_s": least_s}),
            world_size=plan.world_size,
            threads=plan.placement.threads,
            log_dir=str(folder),
            needs=modules_needed(plan),
            at_stop="abandon",
        )
        return ask_rank_0(workers, job, "measured")["step_s"]
