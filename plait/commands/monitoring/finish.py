"""The end of a run: its receipt, with the plan's forecast beside what was measured, and what is printed of it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Literal

from plait.commands.monitoring.forecast_monitor import ForecastMonitor
from plait.commands.planning.introduction import Details, reason_lines
from plait.errors import RunFailed
from plait.machines.catalog import Device, find_device_by_driver_name
from plait.model.weights import training_flops_per_token
from plait.partition.execution import Compile
from plait.planner.calibration.factors import (
    LEAST_STEPS_TO_LEARN,
    ForecastBasis,
    observation_of_items,
    observation_of_step,
    observation_text,
    without_calibration,
)
from plait.planner.derive.model_size import budget_of
from plait.planner.plan import Forecast, Plan
from plait.probing.calibration_store import add_observation, store_expert_load
from plait.recipe.schema import RunConfig
from plait.report.bottleneck import bottleneck_rows
from plait.report.incidents import lost_by_cause, read_incidents, skipped_ranges
from plait.report.metrics import RECEIPT_WARM_UP_STEPS, StepReport, median_speed, read_metrics
from plait.report.plausibility import efficiency_doubt, mfu_doubt
from plait.report.receipt import Receipt
from plait.report.receipt_file import read_receipt, write_receipt
from plait.run_files.bottleneck import bottleneck_if_known
from plait.run_folder import RunFolder
from plait.screen.console import sparkline
from plait.screen.screen import Screen
from plait.units import Amount, compared_text, counted, format_count, format_duration
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

BUDGET_TOLERANCE_FACTOR = 1.15


def finish_run(
    config: RunConfig,
    folder: RunFolder,
    plan: Plan,
    steps_done: int,
    screen: Screen,
    monitor: ForecastMonitor | None = None,
    *,
    details: Details = (),
    working: WorkingFolder = CURRENT_FOLDER,
) -> Receipt:
    """Write, print and return the receipt of a finished run, store its observation for later forecasts, and say so if a
    time budget was missed.

    `monitor` compared the last start with the forecast; None where the plan had none.
    """
    if monitor is not None:
        monitor.finish()
    receipt = _make_receipt(folder, plan, steps_done, monitor)
    write_receipt(receipt, folder.receipt)
    _print_end(folder, receipt, screen, details)
    missed = missed_budget_line(budget_of(config), receipt, plan.arithmetic.compile)
    if missed and not plan.job.ends_with_its_text:
        screen.print(missed)
    if monitor is not None:
        _print_observation(monitor, screen, details, working)
    _store_expert_load(folder, plan, screen, working)
    return receipt


def missed_budget_line(budget: Amount, receipt: Receipt, compile: Compile) -> str:
    """That a run took longer or shorter than its budget of time, and why; empty where it did not, or had none."""
    if budget.unit != "seconds" or _about_equal(receipt.wall_s, budget.value):
        return ""
    stepping_s = receipt.steps * receipt.step_s_median
    missed = f"the run took {format_duration(receipt.wall_s)}, not {budget}: "
    if receipt.wall_s < stepping_s or not _about_equal(stepping_s, budget.value):
        return missed + (
            "steps were slower than timed" if receipt.wall_s > budget.value else "steps were faster than timed"
        )
    compiling = "compiling layers, " if compile == "blocks" else ""
    return (
        f"{missed}its steps took {format_duration(stepping_s)}, as planned, and {compiling}evaluations and checkpoints "
        f"{format_duration(receipt.wall_s - stepping_s)}"
    )


def _about_equal(seconds: float, others: float) -> bool:
    return 1 / BUDGET_TOLERANCE_FACTOR <= seconds / others <= BUDGET_TOLERANCE_FACTOR


def print_finished(folder: RunFolder, screen: Screen, details: Details) -> Receipt:
    """Print the end of a run that was finished before, and the reasons of its plan where they are asked for."""
    screen.print(finished_text(folder.path))
    for reason in reason_lines(folder.saved_plan()) if "reasons" in details else ():
        screen.print(f"         · {reason}")
    receipt = read_receipt(folder.receipt)
    _print_end(folder, receipt, screen, details)
    return receipt


def finished_text(folder: Path) -> str:
    """The output of a command for a run with nothing left to do."""
    return f"{folder} is finished; a larger train.budget continues it"


def _print_end(folder: RunFolder, receipt: Receipt, screen: Screen, details: Details) -> None:
    losses = [report.loss for report in read_metrics(folder.metrics)[0]]
    if "receipt" in details:
        screen.print(str(receipt))
    screen.print(run_end(receipt, folder.path, losses, screen.encoding))


def _make_receipt(folder: RunFolder, plan: Plan, steps_done: int, monitor: ForecastMonitor | None) -> Receipt:
    steps, evaluations = read_metrics(folder.metrics)
    incidents, back = read_incidents(folder.incidents)
    speed = median_speed(_steps_of_this_plan(folder, steps, steps_done), (0, steps_done))
    evaluation = evaluations[-1] if evaluations else None
    so_far, forecast = folder.totals, plan.forecast
    full, causal = (training_flops_per_token(plan.job.shape, plan.job.sequence, kind) for kind in ("full", "causal"))
    device_hours = so_far.device_s / 3600
    known = device_with_price(plan)
    predicted, came = (monitor.predicted, monitor.observed) if monitor else (None, None)
    return Receipt(
        steps=plan.job.steps,
        tokens=steps[-1].tokens,
        world_size=plan.world_size,
        layout=plan.placement.layout.degrees,
        train_loss=steps[-1].loss,
        eval_loss=evaluation.eval_loss if evaluation else None,
        eval_nats_per_byte=evaluation.eval_nats_per_byte if evaluation else None,
        pair_accuracy=evaluation.pair_accuracy if evaluation else steps[-1].pair_accuracy,
        choices_accuracy=evaluation.choices_accuracy if evaluation else None,
        choices_accuracy_per_byte=evaluation.choices_accuracy_per_byte if evaluation else None,
        step_s_median=speed.step_s_median,
        predicted_step_s=forecast.step_s if forecast else None,
        timed_step_s=plan.step_s,
        untimed_step_s=_untimed_step_s(forecast),
        tokens_per_s=speed.tokens_per_s,
        mfu=speed.tokens_per_s * full / plan.machines.peak_flops if plan.machines.peak_flops else None,
        mfu_causal=speed.tokens_per_s * causal / plan.machines.peak_flops if plan.machines.peak_flops else None,
        peak_tensor_bytes=so_far.peak_tensor_bytes,
        predicted_peak_bytes_per_device=forecast.tensor_bytes if forecast else None,
        peak_rss_bytes=so_far.peak_rss_bytes,
        wall_s=so_far.wall_s,
        device_hours=device_hours,
        one_device_step_s=forecast.one_device_step_s if forecast else None,
        cost_usd=_total_or_none(device_hours, known.price_per_hour if known else None),
        energy_wh=_total_or_none(device_hours, known.watts if known else None),
        versions=dict(plan.machines.fingerprint["versions"]),
        device=_devices_text(plan),
        one_device_from=_SOURCE_OF_BASIS[predicted.basis] if predicted else None,
        predicted_items=predicted.items.measurable_items() if predicted else None,
        measured_items=came.items.measurable_items() if came and came.items else None,
        predicted_rss_bytes=forecast.bytes_per_device if forecast and plan.machines.device == "cpu" else None,
        taught_by_runs=predicted.calibration.runs if predicted else 0,
        optimizer=_chosen_optimizer(plan),
        matmul_backend=plan.arithmetic.matmul_backend,
        matmul_flops=plan.arithmetic.matmul_flops,
        matmul_error=plan.arithmetic.matmul_error,
        incidents=tuple(incident.sentence for incident in incidents),
        samples_skipped=sum(one.last - one.first + 1 for one in skipped_ranges(incidents)),
        updates_skipped=steps[-1].updates_skipped,
        loss_scale=steps[-1].loss_scale,
        copy_every_steps=(plan.job.steps + sum(one.steps_lost for one in incidents)) / so_far.copies
        if so_far.copies
        else None,
        copy_share=so_far.copy_s / so_far.wall_s if so_far.copies and so_far.wall_s > 0 else None,
        lost_by_cause=lost_by_cause(incidents, back) or None,
        useful_share=_useful_share(steps, so_far.wall_s),
        bottleneck=bottleneck_if_known(folder),
    )


def _useful_share(steps: Sequence[StepReport], wall_s: float) -> float | None:
    useful_s = sum(report.step_s for report in steps if isfinite(report.step_s))
    return min(1.0, useful_s / wall_s) if wall_s > 0 else None


def device_with_price(plan: Plan) -> Device | None:
    """The catalogue's entry for a plan's GPUs; None for CPUs, if hosts differ, and for unknown GPUs."""
    if not plan.machines.have_accelerators or _has_several_host_kinds(plan):
        return None
    return find_device_by_driver_name(plan.machines.fingerprint["name"])


def _has_several_host_kinds(plan: Plan) -> bool:
    """Whether the plan's hosts differ; a price is known for the first kind only."""
    return len({host.machine for host in plan.machines.hosts}) > 1


def _devices_text(plan: Plan) -> str:
    """The plan's devices in words: the number of one kind, or the names of the hosts if they differ."""
    if _has_several_host_kinds(plan):
        return " + ".join(f"{host.name} ({counted(host.workers, 'worker')})" for host in plan.machines.hosts)
    return f"{plan.devices} × {plan.machines.fingerprint['name']}"


def _untimed_step_s(forecast: Forecast | None) -> float | None:
    """Step time by formulas and earlier runs, where the forecast is a timed step; else None."""
    if forecast is None or not forecast.calibration.is_measured:
        return None
    return forecast.step_s / forecast.calibration.timed


_SOURCE_OF_BASIS: Mapping[ForecastBasis, Literal["measurement", "formulas"]] = {
    "clock": "measurement",
    "formulas": "formulas",
}


def _steps_of_this_plan(folder: RunFolder, steps: Sequence[StepReport], steps_done: int) -> Sequence[StepReport]:
    """The steps that ran under this plan; earlier steps of the run may have had another layout."""
    own = [report for report in steps if report.step > steps_done + RECEIPT_WARM_UP_STEPS]
    return own if own and (folder.path / "plan-1.json").exists() else steps


def _print_observation(monitor: ForecastMonitor, screen: Screen, details: Details, working: WorkingFolder) -> None:
    """Store the run's observation, and print why nothing was learned; what was learned, where all is asked for."""
    learned, sentence = _record_observation(monitor, working)
    if not learned or "receipt" in details:
        screen.print(sentence)


def _record_observation(monitor: ForecastMonitor, working: WorkingFolder) -> tuple[bool, str]:
    """Store the run's observation for the next forecast on these machines; returns whether it was, and the sentence
    that says what was learned, or why nothing."""
    predicted, came = monitor.predicted, monitor.observed
    why = monitor.why_not_to_learn()
    if came is None or why:
        return False, f"this run does not change later forecasts here: {why}"
    today = datetime.now(UTC).date().isoformat()
    said = without_calibration(predicted.items, predicted.calibration)
    computed_s = came.step_s - came.data_s
    observation = (
        observation_of_items(said, came.items, today) if came.items else observation_of_step(said, computed_s, today)
    )
    if observation is None:
        return (
            False,
            "this run does not change later forecasts here: computing and waiting could not be measured separately",
        )
    try:
        add_observation(predicted.calibration.ground, observation, working)
    except RunFailed as error:  # the run itself is finished and safe
        return False, f"the times of this run are not used for later forecasts: {error}"
    return True, observation_text(observation, predicted.basis)


def _store_expert_load(folder: RunFolder, plan: Plan, screen: Screen, working: WorkingFolder) -> None:
    """Keep how unequal the loads of a mixture's experts were in the second half of the run, for later plans."""
    loads = [one.expert_load_max for one in read_metrics(folder.metrics)[0] if one.expert_load_max is not None]
    if plan.job.shape.mixture is None or len(loads) < LEAST_STEPS_TO_LEARN:
        return
    try:
        store_expert_load(plan.job.shape.mixture, median(loads[len(loads) // 2 :]), working)
    except RunFailed as error:  # the run itself is finished and safe
        screen.print(f"the loads of this run's experts are not used for later plans: {error}")


def _total_or_none(device_hours: float, each: float | None) -> float | None:
    return None if each is None else device_hours * each


# On the screen: how well the run learned, how fast, where it is, and what to do with it.


CURVE_COLUMNS = 24


def run_end(receipt: Receipt, folder: Path, losses: Sequence[float], encoding: str) -> str:
    """Six lines, and one more for each figure that cannot be right; `losses` are the losses of all steps, for the
    curve."""
    name = shlex.quote(folder.name)
    lines = [
        f"done     {counted(receipt.steps, 'step')}, {format_count(receipt.tokens)} tokens "
        f"in {format_duration(receipt.wall_s)}",
        f"loss     {_loss_text(receipt)}  {sparkline(losses, CURVE_COLUMNS, encoding)}".rstrip(),
        f"speed    {_speed_text(receipt)}",
        *bottleneck_rows(receipt.bottleneck),
        f"saved    {folder}/checkpoints/step-{receipt.steps}; all figures: receipt.json",
        f"next     plait sample {name}",
        f"         plait eval {name}",
    ]
    return "\n".join([*lines, *doubt_lines(receipt)])


def doubt_lines(receipt: Receipt) -> list[str]:
    """A warning for each figure that is better than is possible."""
    speedup = receipt.efficiency and receipt.world_size > 1 and efficiency_doubt(receipt.efficiency, receipt.world_size)
    doubts = [
        f"MFU {receipt.mfu:.1%}{mfu_doubt(receipt.mfu)}" if mfu_doubt(receipt.mfu) else "",
        f"{receipt.speedup_vs_one:.2f} times one device alone{speedup}" if speedup else "",
    ]
    return [f"warning  {doubt}" for doubt in doubts if doubt]


def _chosen_optimizer(plan: Plan) -> dict[str, str | float]:
    optimizer = plan.job.optimizer
    chosen: dict[str, str | float] = {"kind": optimizer.kind, "lr": optimizer.lr}
    if optimizer.kind == "muon" and optimizer.adamw_lr is not None:
        numbers = plan.arithmetic.orthogonalization_precision
        chosen |= {"adamw_lr": optimizer.adamw_lr, "momentum": optimizer.momentum, "orthogonalized_in": numbers}
    return chosen


def _loss_text(receipt: Receipt) -> str:
    if receipt.pair_accuracy is not None:
        held_out = receipt.eval_loss is not None
        text = f"{receipt.eval_loss if held_out else receipt.train_loss:.4f} a pair, {receipt.pair_accuracy:.1%} of "
        return f"{text}{'held-out ' if held_out else ''}pairs ranked right{'' if held_out else ' in the last step'}"
    if receipt.eval_nats_per_byte is None:
        return f"{receipt.train_loss:.4f} nats per token in the last step"
    text = f"{receipt.eval_nats_per_byte:.4f} nats per byte held out"
    return text if receipt.choices_accuracy is None else f"{text}, {receipt.choices_accuracy:.1%} of choices right"


def _speed_text(receipt: Receipt) -> str:
    text = f"{format_count(receipt.tokens_per_s)} tokens/s, {format_duration(receipt.step_s_median)} a step"
    if receipt.predicted_step_s is not None and receipt.step_error is not None:
        text += f" (planned {format_duration(receipt.predicted_step_s)}: {_difference_text(receipt.step_error)})"
    return text if receipt.mfu is None else f"{text}, MFU {receipt.mfu:.0%}"


def _difference_text(step_error: float) -> str:
    """How the measured step compares with the planned one, from planned / measured - 1."""
    ratio = 1 / (1 + step_error)
    return "as planned" if abs(ratio - 1) < 0.005 else compared_text(ratio, "slower", "faster")
