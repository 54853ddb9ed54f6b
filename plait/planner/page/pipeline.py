"""The page's timeline of a pipeline: which stage works when, by the lists of actions that its ranks carry out."""

from __future__ import annotations

from dataclasses import dataclass

from plait.partition.pipeline_schedule import schedule_actions
from plait.partition.pipeline_simulation import StageTimes, Timeline, simulate
from plait.planner.heterogeneous.unequal_pipeline import unequal_stage_times
from plait.planner.problem.candidates import SCHEDULES
from plait.planner.problem.stage_partition import micro_batches_per_step
from plait.planner.search.cost_breakdown import time_items
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import filled_batches, step_time_of
from plait.planner.step_time.pipeline_step_time import stage_times_of
from plait.report.figures import time_words

ACTIONS_DRAWN = 6000
"""Actions that a picture may hold; where a step has more, fewer micro-batches are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePicture:
    """A step of the chosen pipeline, with as many of its micro-batches as can be seen."""

    timeline: Timeline
    virtual: int
    micros: int
    """Micro-batches of a whole step."""
    drawn: int
    once_s: float
    """What comes once a step and is drawn at its end: parameters, gradients, the optimizer."""
    waiting: float
    """Share of a whole step in which the busiest stage waits for the others."""


def pipeline_picture(found: Search) -> PipelinePicture | None:
    """The chosen layout's timeline; None where it has no pipeline."""
    row = found.candidates.row(found.chosen)
    ranks, virtual = int(row["pipeline"]), int(row["virtual"])
    if ranks == 1:
        return None
    times, micros = stage_times(found, found.chosen)
    most = ACTIONS_DRAWN // (3 * ranks * virtual)
    drawn = min(micros, max(most - most % ranks, 2 * ranks))
    schedule = SCHEDULES[int(found.candidates.schedule[found.chosen])]
    items = time_items(found, found.chosen)
    return PipelinePicture(
        timeline=simulate(schedule_actions(schedule, ranks=ranks, virtual=virtual, micros=drawn), times),
        virtual=virtual,
        micros=micros,
        drawn=drawn,
        once_s=items["parameters"] + items["gradients"] + items["optimizer"],
        waiting=items["bubble"] / sum(items.values()),
    )


def stage_times(found: Search, index: int) -> tuple[StageTimes, int]:
    """Seconds of each stage for one micro-batch, and a step's micro-batches, as the search simulated them."""
    group = found.assigner.group_of(found.candidates, index)
    inputs = found.cost_inputs.with_candidates(group.candidates)
    if group.assignment is not None and not group.assignment.is_even:
        return unequal_stage_times(inputs, group.assignment, step_time_of(inputs))
    [(_, filled)] = filled_batches(inputs)
    return stage_times_of(filled), round(float(micro_batches_per_step(filled.workload, filled.candidates)[0]))


def pipeline_caption(picture: PipelinePicture | None) -> str:
    """What one sees, in words; without a pipeline, that there is none."""
    if picture is None:
        return (
            "The chosen layout has no pipeline: every device works on all layers, and none waits for another one's "
            "stage."
        )
    ranks = len(picture.timeline.ranks)
    words = (
        f"The layers stand on {ranks} groups of devices, a line each. Every block is one group's work on one of the "
        f"{picture.micros:,} micro-batches of a step; gaps are waiting (the bubble), {picture.waiting:.1%} of the step "
        f"on the busiest group."
    )
    if picture.virtual > 1:
        words += f" Each group holds {picture.virtual} chunks of layers in turn: the fainter, the later in the model."
    if picture.drawn < picture.micros:
        words += (
            f" Only {picture.drawn} micro-batches are drawn, so that gaps look larger here "
            f"({picture.timeline.bubble:.0%}) than they are."
        )
    return f"{words} At the end come gradients and the optimizer, {time_words(picture.once_s)} once a step."
