"""Run folders written as `plait train` leaves them, without training: recipe, plan, steps, evaluations, receipt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from plait.planner.plan import Plan
from plait.recipe.load import parse_config, requested_values
from plait.recipe.schema import RunConfig
from plait.report.incidents import Incident, StartLine, append_incident, append_start
from plait.report.metrics import EvalReport, StepReport
from plait.report.rank_times_file import RankTimesLine
from plait.report.receipt import Receipt
from plait.report.receipt_file import write_receipt
from plait.run_folder import RunFolder
from plait.working_folder import WorkingFolder
from tests.planner.machines import LAPTOP, PLAYS, planned, recipe
from tests.plans import changed
from tests.report.test_report_metrics import step_report
from tests.report.test_report_receipt import RECEIPT

STEPS = 100


@cache
def usual_recipe_and_plan() -> tuple[RunConfig, Plan]:
    """A run of 100 steps on one worker; its text is named and not there."""
    with TemporaryDirectory() as folder:
        config = recipe(Path(folder), f"train.budget={STEPS} steps", "layout.replicate=1", "model.size=1M")
        return config, planned(config, PLAYS, LAPTOP)


def written_run(
    working: WorkingFolder,
    name: str,
    *,
    steps_done: int = STEPS,
    loss: float = 2.0,
    held_out: float | None = 1.5,
    step_s: float = 0.05,
    receipt: Receipt | None = None,
    settings: Mapping[str, object] = MappingProxyType({}),
    **plan_values: object,
) -> RunFolder:
    """A run with `steps_done` steps, the last of loss `loss`, and an evaluation of `held_out` nats per byte at its end;
    with a receipt where it is finished. `settings` are recipe keys that differ from the usual ones."""
    config, plan = usual_recipe_and_plan()
    values = requested_values(config)
    for key, value in {"run.name": name, **settings}.items():
        section, _, inner = key.partition(".")
        values[section][inner] = value
    folder = RunFolder(working.runs / name)
    folder.path.mkdir(parents=True)
    folder.save_config_and_plan(parse_config(values), changed(plan, **plan_values))
    write_metrics(folder, losses(steps_done, loss), held_out, step_s)
    append_start(folder.starts, StartLine(generation=1, steps_done=0, at="2026-11-28T10:00:00+00:00"))
    if steps_done == folder.saved_plan().job.steps:
        done = replace(
            receipt or RECEIPT,
            steps=steps_done,
            tokens=steps_done * 1024,
            train_loss=loss,
            eval_nats_per_byte=held_out,
            step_s_median=step_s,
            tokens_per_s=1024 / step_s,
        )
        write_receipt(done, folder.receipt)
    return folder


def losses(steps: int, last: float) -> Sequence[float]:
    """A loss for each step, falling to the last one."""
    return [last * (2 - step / steps) for step in range(1, steps + 1)]


def write_metrics(folder: RunFolder, losses: Sequence[float], held_out: float | None, step_s: float = 0.05) -> None:
    """One line for each loss, and that of an evaluation after the last one."""
    lines: list[StepReport | EvalReport] = [
        step_report(step, loss=loss, step_s=step_s, tokens_per_s=1024 / step_s) for step, loss in enumerate(losses, 1)
    ]
    if held_out is not None and losses:
        lines.append(EvalReport(step=len(losses), eval_loss=2.6 * held_out, eval_nats_per_byte=held_out))
    folder.metrics.write_text("".join(line.to_line() for line in lines))


def write_rank_times(
    folder: RunFolder, *, steps: int, compute_s: float, wait_s: float = 0.0, data_s: float = 0.0, each: int = 10
) -> None:
    """The times of a run of one rank, a line each ten steps, in addition to those that are there."""
    lines = [
        RankTimesLine(
            step=step, steps=each, compute_s=(compute_s,), wait_s=(wait_s,), inside_s=(0.0,), data_s=(data_s,)
        )
        for step in range(each, steps + 1, each)
    ]
    with folder.rank_times.open("a") as file:
        file.writelines(json.dumps(asdict(line)) + "\n" for line in lines)


def incident_of(generation: int, step: int, **values: object) -> Incident:
    """A worker that was killed, after which the run gave up."""
    usual = Incident(
        generation=generation,
        at="2026-11-28T10:01:00+00:00",
        cause="killed",
        what="rank 0 was killed",
        rank=0,
        host=None,
        device=None,
        step=step,
        place="",
        stack="",
        resumed_from=0,
        lost_s=1.0,
        found_after_s=0.0,
        decision="gave up",
        sentence="rank 0 was killed by SIGKILL",
    )
    return replace(usual, **values)


def fail(folder: RunFolder, generation: int, step: int) -> None:
    """Have a run end by a failure of that start."""
    append_incident(folder.incidents, incident_of(generation, step))
