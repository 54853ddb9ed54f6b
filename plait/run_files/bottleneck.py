"""What limits a run, from the files in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from plait.errors import PlaitError
from plait.planner.bottleneck.find import MeasuredRun, find_bottleneck
from plait.planner.plan import Plan
from plait.recipe.load import flat_values
from plait.report.bottleneck import RunBottleneck
from plait.report.metrics import RECEIPT_WARM_UP_STEPS, StepReport, read_last_metrics
from plait.report.rank_times_file import RankTimesLine, read_rank_times
from plait.report.shares_file import SharesLine, read_shares
from plait.run_folder import RunFolder

RECENT_STEPS = 2000
"""The present bottleneck is found from at most this many steps at the end of a run."""


def bottleneck_of(folder: RunFolder) -> RunBottleneck | None:
    """What limits a run; None if its files do not show it, as before the ranks write their first times. Raises
    PlaitError if a file is damaged."""
    plan = folder.saved_plan()
    steps, _ = read_last_metrics(folder.metrics, n_steps=RECENT_STEPS, evaluation_within=0)
    plan = _at_present(plan, read_shares(folder.shares))
    run = measured_run(plan, steps, read_rank_times(folder.rank_times), folder.totals.start_s)
    if run is None:
        return None
    named = [key for key, value in flat_values(folder.saved_config()).items() if value not in ("auto", None)]
    try:
        return find_bottleneck(plan, run, named)
    except ArithmeticError:  # a plan that was edited may have a machine without a speed
        return None


def _at_present(plan: Plan, changes: Sequence[SharesLine]) -> Plan:
    """The plan with the run's present shares and stages, which may have changed during the run."""
    if not changes or len(changes[-1].shares) != len(plan.sequences_per_replica):
        return plan
    last, placement = changes[-1], plan.placement
    layout = replace(placement.layout, stage_layers=last.stage_layers) if last.stage_layers else placement.layout
    return replace(plan, placement=replace(placement, shares=tuple(last.shares), layout=layout))


def measured_run(
    plan: Plan, steps: Sequence[StepReport], lines: Sequence[RankTimesLine], start_s: float
) -> MeasuredRun | None:
    """How a run spends its steps: medians over the last half of the times that its ranks wrote under this plan; None
    if there are none."""
    lines = [line for line in lines if line.ranks == plan.world_size]
    recent = lines[len(lines) // 2 :]
    if not recent or not steps:
        return None
    first = recent[0].step - recent[0].steps
    own = [one.step_s for one in steps if one.step > first and one.step_s > 0]
    if not own:
        return None

    def middle(name: str) -> tuple[float, ...]:
        return tuple(median(values) for values in zip(*(getattr(line, name) for line in recent), strict=True))

    step_s = median(own)
    warming = [one.step_s for one in steps if one.step <= RECEIPT_WARM_UP_STEPS]
    return MeasuredRun(
        step_s=step_s,
        compute_s=middle("compute_s"),
        wait_s=middle("wait_s"),
        inside_s=middle("inside_s"),
        data_s=middle("data_s"),
        start_s=start_s + max(0.0, sum(warming) - len(warming) * step_s),
    )


def bottleneck_if_known(folder: RunFolder) -> RunBottleneck | None:
    """What limits a run; None also if a file is damaged, for callers that show it beside something else."""
    try:
        return bottleneck_of(folder)
    except (PlaitError, OSError):
        return None
