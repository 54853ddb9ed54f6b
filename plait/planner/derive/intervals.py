"""How many steps a run has and how often things happen in it, also when a begun run is given a larger budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Literal

from plait.devices import DEVICE_TRAITS, DeviceName
from plait.errors import PlaitError
from plait.planner.derive.derived import Derived
from plait.planner.derive.model_size import budget_of
from plait.planner.plan import Plan
from plait.recipe.schema import RunConfig
from plait.units import Amount, Every, counted, parse_every, part_of

DEFAULT_BALANCE_EVERY_STEPS = 50
EVALUATIONS_AT_MOST = 10
"""Most evaluations of a run whose recipe names no interval, however often it is continued, but for those at the end."""
CHECKPOINT_COST_SHARE = 0.02
"""Largest share of the time for saving, and for copies in memory, by default."""


def with_raised_budget(config: RunConfig, plan: Plan) -> Plan:
    """A begun run's plan for a raised budget: more steps, all else as it was. Raises PlaitError for a lowered one."""
    budget, old_budget = budget_of(config), plan.job.budget
    if budget.unit == old_budget.unit == "seconds":
        step_s = plan.step_s or (plan.forecast.step_s if plan.forecast else None)
        more_of_it = budget.value > old_budget.value and plan.job.ends_with_its_text
        grown = budget.value / step_s if step_s and more_of_it else plan.job.steps * budget.value / old_budget.value
        steps = max(plan.job.steps, round(grown))
    elif budget.unit != old_budget.unit and (budget.unit == "epochs" or (budget.unit == "seconds" and not plan.step_s)):
        raise PlaitError(f"this run counts in {old_budget.unit}; raise train.budget in {old_budget.unit} too")
    else:
        budget = replace(budget, epoch_tokens=old_budget.epoch_tokens)
        steps = steps_in_budget(budget, plan.batch_tokens, step_s=plan.step_s)
    if steps < plan.job.steps or (budget.unit == old_budget.unit and budget.value < old_budget.value):
        same_unit = budget.unit == old_budget.unit
        asked = _exact(budget) if same_unit else f"{_exact(budget)} ({counted(steps, 'step')})"
        present = _exact(old_budget) if same_unit else counted(plan.job.steps, "step")
        raise PlaitError(
            f"train.budget = {asked} is less than the {present} that this run has; "
            "a begun run's budget may only grow (or take another run.name)"
        )
    # Who asks for more of a text that is learned gets it.
    most_tokens = plan.job.most_tokens if steps == plan.job.steps else None
    return replace(plan, job=replace(plan.job, budget=budget, steps=steps, most_tokens=most_tokens))


def with_evaluations_left(config: RunConfig, plan: Plan, evaluated: Sequence[int]) -> Plan:
    """A begun run's plan for a raised budget, with the evaluations that are left of EVALUATIONS_AT_MOST; where these
    were all made, only the one at the end. `evaluated` are the steps after which there was one. An interval that the
    recipe names stays."""
    if config.report.evaluate != "auto" or not plan.cadence.evaluate_every_steps:
        return plan
    between = EVALUATIONS_AT_MOST - len(evaluated) - 2  # one at the end, and one where an interval is cut
    steps = plan.job.steps - max(evaluated, default=0)
    every = max(plan.cadence.evaluate_every_steps, ceil(steps / between)) if between > 0 else 0
    return replace(plan, cadence=replace(plan.cadence, evaluate_every_steps=every))


def _exact(budget: Amount) -> str:
    """To the last digit: 1,999 and 2,000 steps are both 2K."""
    return str(budget) if budget.unit == "seconds" else f"{budget.value:,.0f} {budget.unit}"


def with_new_intervals(config: RunConfig, plan: Plan) -> Plan:
    """A begun run's plan with the intervals for checkpoints, reports and balance that its recipe now has."""
    old, report, checkpoint = plan.cadence, config.report, config.checkpoint
    cadence = replace(
        old,
        checkpoint_every=old.checkpoint_every if checkpoint.every == "auto" else parse_every(checkpoint.every),
        checkpoint_keep=checkpoint.keep,
        checkpoint_keep_s=parse_every(checkpoint.keep_for).value,
        report_every_steps=(
            old.report_every_steps if report.every == "auto" else report_every_steps(config, plan.machines.device)
        ),
        balance_every_steps=(
            old.balance_every_steps if config.balance.every == "auto" else balance_every_steps(config, "unequal")
        ),
        evaluate_every_steps=(
            old.evaluate_every_steps if report.evaluate == "auto" else round(parse_step_interval(report.evaluate).value)
        ),
    )
    return replace(plan, job=replace(plan.job, choices=report.choices or ""), cadence=cadence)


def checkpoint_every(config: RunConfig) -> Derived[Every]:
    """How often to save; the recipe's own interval is obeyed regardless of the cost of saving."""
    if config.checkpoint.every != "auto":
        return Derived(value=parse_every(config.checkpoint.every))
    copies = config.recover.mode == "auto" and config.recover.state_every != "never"
    cost_share = CHECKPOINT_COST_SHARE / 2 if copies else CHECKPOINT_COST_SHARE  # the rest is theirs
    share = f"{cost_share:.0%}"
    reason = (
        f"a checkpoint every minute: that much is lost at most (less often where saving takes over {share} of the time)"
    )
    return Derived(value=Every(60, "seconds", cost_share), reasons=(reason,))


def report_every_steps(config: RunConfig, device: DeviceName) -> int:
    """Steps between two fetches of the scalars: a GPU should not wait for each."""
    requested = config.report.every
    if requested != "auto":
        every = parse_step_interval(requested)
        if every.value == 0:
            raise PlaitError('report.every = "never" would lose the losses; write for example "100 steps"')
        return max(1, round(every.value))
    return 10 if DEVICE_TRAITS[device].is_accelerator else 1


def balance_every_steps(config: RunConfig, devices: Literal["alike", "unequal"]) -> int:
    """Steps between changes of the shares, 0 for never; `devices` are "alike" only on one host of equal devices."""
    requested = config.balance.every
    if requested == "auto":
        return 0 if devices == "alike" else DEFAULT_BALANCE_EVERY_STEPS
    return ceil(parse_step_interval(requested, section="balance").value)


def parse_step_interval(text: str, section: str = "report") -> Every:
    """An interval that only steps can measure, since all ranks must agree on it; raises PlaitError."""
    every = parse_every(text)
    if every.unit != "steps":
        raise PlaitError(f'"{text}" under [{section}] must count steps; write for example "100 steps" or "never"')
    return every


def steps_in_budget(budget: Amount, batch_tokens: int, *, step_s: float | None) -> int:
    """A budget in optimizer steps; a time budget needs the measured time of one, else it is 1 for the time being."""
    if budget.unit == "steps":
        return max(1, round(budget.value))
    if budget.unit == "tokens":
        return max(1, round(budget.value / batch_tokens))
    if budget.unit == "epochs":  # the last step takes what is left
        return ceil(part_of(budget.value, budget.epoch_tokens) / batch_tokens)
    return max(1, int(budget.value / step_s)) if step_s else 1
