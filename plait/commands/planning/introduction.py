"""The start of a run on the screen: model, devices, time and folder, a line each; the reasons where they are asked
for."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from plait.layout import Layout
from plait.machines.machine import usable_cores
from plait.model.shape import ModelShape, parameter_count
from plait.model.weights import active_parameter_count, trained_parameter_count
from plait.planner.calibration.factors import calibration_text
from plait.planner.plan import Plan
from plait.planner.problem.model_words import objectives_text
from plait.planner.rebalancing.batch_rebalance import why_rebalancing_cannot_help
from plait.planner.resolve.resolve import plan_summary
from plait.run_files.running_runs import registry_folder, run_on_this_machine, running_runs, sharing_lines
from plait.run_folder import RunFolder
from plait.units import counted, format_bytes, format_count, format_duration

Details = Collection[Literal["reasons", "receipt"]]
"""Additional output to the short start and end: the reasons of the plan (--why), the whole receipt (--verbose)."""
StartOf = Literal["new plan", "known plan"]
"""Whether a run's plan was just made, or its warnings were read when it was."""
PARTS_IN_WORDS = {
    "pipeline": "{} groups of layers",
    "replicate": "{} copies",
    "shard": "state in {} parts",
    "context": "sequences in {} parts",
    "tensor": "matrices in {} parts",
    "expert": "experts in {} groups",
}


def run_start(plan: Plan, folder: Path, details: Details = (), start: StartOf = "new plan") -> str:
    """Four lines: the model and the run's name, the devices and their work, how long it takes, where it is; one more
    where faster arithmetic than torch's default was chosen; then warnings, where the plan is new, and all reasons,
    where they were asked for. The line about the run's text comes before, once that is prepared."""
    lines = [
        f"model    {folder.name}: {model_text(plan.job.shape)}",
        f"devices  {planned_devices_text(plan)}: "
        f"{layout_in_words(plan.placement.layout)}, {planned_workers_text(plan)}",
        f"time     {_time_text(plan)}",
        f"run      {folder}, {_saved_text(plan)}; --why gives the reasons",
    ]
    if plan.faster_arithmetic:
        lines.insert(2, f"numbers  {plan.faster_arithmetic}")
    warnings = plan.warnings if start == "new plan" or "reasons" in details else ()
    reasons = reason_lines(plan) if "reasons" in details else []
    points = (*(f"warning: {warning}" for warning in warnings), *reasons)
    return "\n".join([*lines, *(f"         · {point}" for point in points)])


def model_text(shape: ModelShape) -> str:
    """A model's size, and what is special about it."""
    size = f"{format_count(parameter_count(shape))} parameters in {counted(shape.layers, 'layer')}"
    return f"{size}, width {shape.width}{_adapter_text(shape)}{mixture_text(shape)}{objectives_text(shape)}"


def _adapter_text(shape: ModelShape) -> str:
    """How many weights learn, if only an adapter does; else empty."""
    if shape.adapter is None:
        return ""
    kept = shape.adapter.quantization
    beside = "" if kept == "none" else f", beside {kept}"
    beside += "".join(f", {table}" for table in shape.adapter.modules_to_save)
    learn = format_count(trained_parameter_count(shape))
    return f"; {learn} learn ({shape.adapter.variant}, rank {shape.adapter.rank}{beside})"


def mixture_text(shape: ModelShape) -> str:
    """How many experts a layer has, and how many of the parameters a token meets; empty without experts."""
    if shape.mixture is None:
        return ""
    met = format_count(active_parameter_count(shape))
    each = f"{shape.mixture.experts} experts a layer, {shape.mixture.experts_per_token} for a token"
    return f"; {each}, which meets {met} of the parameters"


def running_runs_text(plan: Plan, folder: RunFolder) -> str:
    """The effect of other runs on this machine on a run that is about to start; empty if there are none."""
    own = run_on_this_machine(plan, folder.path)
    lines = sharing_lines(own, running_runs(registry_folder()), usable_cores())
    return "\n".join(f"         · {line}" for line in lines)


def reason_lines(plan: Plan) -> list[str]:
    """The reasons of all that was chosen, and what the forecast says."""
    useless = why_rebalancing_cannot_help(plan)
    return [plan_summary(plan), *plan.reasons, *([useless] if useless else []), *_forecast_lines(plan)]


def layout_in_words(layout: Layout) -> str:
    """The effect of each axis, for someone who knows none of their names."""
    degrees = {**layout.degrees, "expert": layout.expert}
    parts = [PARTS_IN_WORDS[axis].format(degree) for axis, degree in degrees.items() if degree > 1]
    return " × ".join(parts) if parts else "one copy"


def time_left_text(plan: Plan, steps_done: int) -> str:
    """Rough time of the remaining steps; empty if a step's time is unknown."""
    step_s = plan.step_s or (plan.forecast.step_s if plan.forecast else None)
    return f"about {format_duration((plan.job.steps - steps_done) * step_s)}" if step_s else ""


def planned_devices_text(plan: Plan) -> str:
    """The machines that a plan is for."""
    if len(plan.machines.hosts) > 1:
        without = (
            f", without {', '.join(host.name for host in plan.machines.left_out)}" if plan.machines.left_out else ""
        )
        return " + ".join(host.name for host in plan.machines.hosts) + without
    found = plan.machines.fingerprint
    if plan.machines.have_accelerators:
        return f"{plan.world_size} × {found['name']}"
    return f"{found['name']}, {counted(found['cores'], 'core')}"


def planned_workers_text(plan: Plan) -> str:
    """The number of workers, and of threads where they compute on a processor."""
    workers = counted(plan.world_size, "worker")
    return workers if plan.machines.have_accelerators else f"{workers} × {counted(plan.placement.threads, 'thread')}"


def _time_text(plan: Plan) -> str:
    """How long the run will take, by which knowledge, and until when it trains."""
    steps, budget = counted(plan.job.steps, "step"), plan.job.budget
    batch = format_count(plan.batch_tokens)
    until = f"{budget} in {steps}" if budget.unit in ("tokens", "epochs") else f"{steps} of {batch} tokens"
    asked = f", budget {budget}" if budget.unit == "seconds" else ""
    if plan.job.ends_with_its_text:
        asked = f"; stops before {budget}: more passes over so small a text would only memorise it"
    known = f"{left} ({'timed' if plan.step_s else 'forecast'}): " if (left := time_left_text(plan, 0)) else ""
    return f"{known}{until}{asked}"


def _saved_text(plan: Plan) -> str:
    every = plan.cadence.checkpoint_every
    return f"saved every {every}" if every.value else "saved at the end"


def _forecast_lines(plan: Plan) -> list[str]:
    """The forecast time of a step, with its error, its memory and corrections from earlier runs."""
    if plan.forecast is None:
        return []
    step_s, error = format_duration(plan.forecast.step_s), plan.forecast.error
    memory = format_bytes(plan.forecast.bytes_per_device)
    calibration = calibration_text(plan.forecast.calibration, plan.forecast.items, plan.forecast.basis)
    copies = (
        f", and {format_bytes(plan.cadence.copy_bytes)} of its host's for copies of the state"
        if plan.cadence.copy_bytes
        else ""
    )
    first = f"forecast: {step_s} a step, give or take {error:.0%}, and {memory} a device{copies}"
    return [first, *([calibration] if calibration else [])]
