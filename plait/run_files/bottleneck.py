"""What limits a run, from the files in its folder."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean, median

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
    if there are none.

    What is left of a step is small, and found from the very steps of a line: computing or waiting of other steps may
    differ by more. Each step counts as its line's mean.
    """
    steps = [one for one in steps if one.step_s > 0]
    lines = [line for line in lines if line.ranks == plan.world_size]
    recent = [(line, own) for line in _last_half(lines, steps) if (own := _step_seconds(line, steps))]
    if not recent:
        return None

    def middle(values: Callable[[RankTimesLine, float], Sequence[float]]) -> tuple[float, ...]:
        rows = [row for line, seconds in recent for row in [values(line, mean(seconds))] * len(seconds)]
        return tuple(median(of_rank) for of_rank in zip(*rows, strict=True))

    run = MeasuredRun(
        compute_s=middle(lambda line, _: line.compute_s),
        wait_s=middle(lambda line, _: line.wait_s),
        inside_s=middle(lambda line, _: line.inside_s),
        data_s=middle(lambda line, _: line.data_s),
        rest_s=middle(_rest_s),
    )
    warming = [one.step_s for one in steps if one.step <= RECEIPT_WARM_UP_STEPS]
    return replace(run, start_s=start_s + max(0.0, sum(warming) - len(warming) * run.step_s))


def _last_half(lines: Sequence[RankTimesLine], steps: Sequence[StepReport]) -> Sequence[RankTimesLine]:
    """The lines of the last half of all steps, if the steps are known from their first to their last; else the last
    line."""
    if not lines or not steps:
        return ()
    begin, end = lines[0].step - lines[0].steps, lines[-1].step
    first = max((begin + end) / 2, steps[0].step - 1)
    return [line for line in lines if line.step - line.steps >= first] or lines[-1:]


def _step_seconds(line: RankTimesLine, steps: Sequence[StepReport]) -> Sequence[float]:
    """Seconds of each step of a line that is known."""
    begin, end = (bisect_right(steps, last, key=lambda one: one.step) for last in (line.step - line.steps, line.step))
    return [one.step_s for one in steps[begin:end]]


def _rest_s(line: RankTimesLine, step_s: float) -> Sequence[float]:
    """What each rank's times leave of a step."""
    parts = zip(line.compute_s, line.wait_s, line.inside_s, line.data_s, strict=True)
    return [max(0.0, step_s - sum(of_rank)) for of_rank in parts]


def bottleneck_if_known(folder: RunFolder) -> RunBottleneck | None:
    """What limits a run; None also if a file is damaged, for callers that show it beside something else."""
    try:
        return bottleneck_of(folder)
    except (PlaitError, OSError):
        return None
