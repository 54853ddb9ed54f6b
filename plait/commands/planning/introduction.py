"""What a run prints before its first step: machine, model, layout, reasons, and how long it will take."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console as Screen

from plait.cluster.topology import usable_cores
from plait.commands.planning.make_plan import MachineSurvey
from plait.commands.planning.run_folder import RunFolder
from plait.commands.planning.running_runs import registry_folder, run_on_this_machine, running_runs, sharing_lines
from plait.layout import layout_summary
from plait.planner.calibration.factors import calibration_text
from plait.planner.plan import Plan
from plait.planner.rebalancing.batch_rebalance import why_rebalancing_cannot_help
from plait.planner.resolve.resolve import plan_summary
from plait.units import counted, format_bytes, format_duration


def print_run_summary(plan: Plan, survey: MachineSurvey, reasons: Sequence[str], screen: Screen) -> None:
    """Print the machine that was found and the plan for it, in a few lines."""
    machine = survey.machine
    found = (
        f"{machine.devices} × {machine.name}"
        if machine.device == "cuda"
        else f"{machine.name}, {counted(machine.cores, 'core')}"
    )
    screen.print(f"machine  {found}, {machine.memory_bytes / 2**30:.0f} GiB")
    screen.print(f"model    {plan_summary(plan)}")
    workers_text = f"{counted(plan.world_size, 'worker')} × {counted(plan.threads, 'thread')}"
    split = layout_summary(plan.layout)
    without = f", without {', '.join(host.name for host in plan.left_out)}" if plan.left_out else ""
    screen.print(f"layout   {split}: {workers_text}{without}, {plan.precision}")
    useless = why_rebalancing_cannot_help(plan)
    for reason in [*reasons, *([useless] if useless else [])]:
        screen.print(f"         · {reason}", highlight=False, markup=False)
    for line in _time_lines(plan):
        screen.print(line, highlight=False)


def lines_about_running_runs(plan: Plan, folder: RunFolder) -> list[str]:
    """What other runs on this machine mean for a run that is about to start; empty where there are none."""
    own = run_on_this_machine(plan, folder.path)
    return sharing_lines(own, running_runs(registry_folder()), usable_cores())


def _time_lines(plan: Plan) -> list[str]:
    """What a step takes by the forecast, and by the clock where one was timed."""
    lines = []
    if plan.forecast:
        lines.append(
            f"forecast {format_duration(plan.forecast.step_s)} a step, give or take {plan.forecast.error:.0%}, and "
            f"{format_bytes(plan.forecast.bytes_per_device)} a device"
        )
        calibration = calibration_text(plan.forecast.calibration, plan.forecast.items, plan.forecast.basis)
        lines += [f"         · {calibration}"] if calibration else []
    if plan.step_s:
        whole = format_duration(plan.steps * plan.step_s)
        lines.append(f"time     about {whole} at {format_duration(plan.step_s)} a step, as timed here")
    return lines
