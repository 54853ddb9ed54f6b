"""`plait plan --prove K`: runs the most promising layouts for a few steps each and keeps the best for `plait train`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.commands.planning.make_plan import proven_plan
from plait.commands.planning.output_files import check_output_file, write_output_file
from plait.commands.preparing.corpus import prepared_corpus
from plait.errors import RunFailed
from plait.layout import Layout, layout_summary
from plait.planner.resolve.named import named_workers
from plait.planner.resolve.worker_layouts import MEASURED_TOLERANCE, WorkerLayout
from plait.probing.survey import survey_machine
from plait.recipe.load import load_recipe
from plait.screen.screen import Screen
from plait.units import counted, format_duration, more_or_less
from plait.workers import worker_pool
from plait.working_folder import CURRENT_FOLDER


def prove(recipe: Path, overrides: Sequence[str], *, count: int, json_file: Path | None, screen: Screen) -> None:
    """Time the `count` layouts with the best forecasts, print how they compare, and store the choice.

    Raises PlaitError in one sentence.
    """
    check_output_file(json_file)
    config = load_recipe(recipe, overrides)
    corpus = prepared_corpus(config, CURRENT_FOLDER, screen)
    with worker_pool() as workers:
        site = survey_machine(workers, named_workers(config))

        def show(split: WorkerLayout) -> None:
            screen.print(trial_text(split))

        def show_failed(split: WorkerLayout, error: RunFailed) -> None:
            screen.print(f"failed   {_layout_text(split)}: {error}")

        plan, trials = proven_plan(config, corpus, site, workers, count=count, on_timed=show, on_failed=show_failed)
    screen.print(winner_text(plan.placement.layout))
    if json_file:
        layouts = [
            _layout_json(
                split, split.layout == plan.placement.layout and split.placement.threads == plan.placement.threads
            )
            for split in trials
        ]
        write_output_file(json_file, json.dumps(layouts, indent=2) + "\n")


def trial_text(split: WorkerLayout) -> str:
    """A layout whose steps were timed, and what they took."""
    return f"timed    {_layout_text(split)}: {_step_time_text(split)}"


def winner_text(layout: Layout) -> str:
    """The layout that was chosen, and its effect on `plait train`."""
    return (
        f"chosen   {layout_summary(layout)}: the simplest within {MEASURED_TOLERANCE:.0%} of the fastest; "
        "a new run of this recipe takes this plan"
    )


def _layout_text(split: WorkerLayout) -> str:
    workers = f"{counted(split.workers, 'worker')} × {counted(split.placement.threads, 'thread')}"
    fewer = f" ({min(split.placement.micro_limits)} where memory is short)" if split.placement.micro_limits else ""
    at_a_time = counted(split.placement.micro_sequences, "sequence")
    return f"{layout_summary(split.layout)}, {at_a_time} at a time{fewer}, {workers}"


def _step_time_text(split: WorkerLayout) -> str:
    measured = format_duration(split.step_s or 0.0)
    if split.forecast is None or not split.step_s:
        return f"{measured} a step"
    return (
        f"{measured} a step, forecast {format_duration(split.forecast.step_s)} "
        f"({more_or_less(split.forecast.step_s / split.step_s - 1, digits=0)} than measured)"
    )


def _layout_json(split: WorkerLayout, chosen: bool) -> dict[str, Any]:
    return {
        "layout": split.layout.degrees,
        "shard_what": split.layout.shard_what,
        "schedule": split.layout.schedule,
        "stage_layers": list(split.layout.stage_layers),
        "recompute": split.layout.recompute,
        "micro_sequences": split.placement.micro_sequences,
        "micro_limits": list(split.placement.micro_limits),
        "workers": split.workers,
        "threads": split.placement.threads,
        "step_s": split.step_s,
        "predicted_step_s": split.forecast.step_s if split.forecast else None,
        "chosen": chosen,
    }
