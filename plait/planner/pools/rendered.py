"""A pool's answer as text and as plain values, for the terminal and for --json."""

from __future__ import annotations

from typing import Any

from plait.planner.pools.answer import PoolAnswer
from plait.planner.pools.availability import SimulatedChoice
from plait.planner.pools.choice import PoolChoice
from plait.planner.pools.choice_words import choice_text, cost_text, money_text
from plait.planner.report.text import aligned_table
from plait.units import counted, format_count, format_days, format_duration

TABLE_HEADINGS = ("", "machines", "pay", "time", "cost", "tokens per", "step", "vs. the recommended one")


def answer_lines(answer: PoolAnswer, columns: int) -> list[str]:
    """The recommendation, the table of choices, the unused devices and the assumptions."""
    currency = answer.pool.currency
    unit = "$" if currency == "USD" else currency
    headings = [f"{text} {unit}" if text == "tokens per" else text for text in TABLE_HEADINGS]
    rows = [headings, *(_row(answer, choice) for choice in answer.choices)]
    assumed = [phrase for choice in answer.choices for phrase in choice.assumed]
    points = [*answer.left_out, *answer.notes]
    lines = [
        f"pool     {answer.pool.name}: {counted(answer.pool.n_devices, 'device')}"
        f"{f' in {len(answer.pool.zones)} zones' if len(answer.pool.zones) > 1 else ''}",
        f"take     {answer.sentence}",
        *(f"         · {point}" for point in points),
    ]
    said = list(dict.fromkeys(assumed))
    assumptions = [f"{'assumed' if place == 0 else '':8} · {phrase}" for place, phrase in enumerate(said)]
    return [*lines, "", aligned_table(rows, columns), "", *assumptions, *([""] if assumptions else [])]


def _row(answer: PoolAnswer, choice: PoolChoice) -> tuple[str, ...]:
    per_cost = choice.tokens_per_cost
    return (
        "→" if choice is answer.best else "",
        str(choice.selection),
        choice.purchase,
        format_days(choice.wall_s),
        cost_text(choice),
        "" if per_cost is None else format_count(per_cost),
        format_duration(choice.step_s),
        answer.why(choice),
    )


def simulated_text(simulated: SimulatedChoice) -> str:
    """Whether spot machines that come and go pay off, with the figures."""
    run, beside, currency = simulated.run, simulated.beside, simulated.currency
    took = f"{format_days(run.wall_s)} and {money_text(run.cost, currency)}"
    idle = f", {format_days(run.idle_s)} of it without any machines" if run.idle_s else ""
    figures = (
        f"with {simulated.availability.source} the run takes {took}{idle}, with "
        f"{counted(run.interruptions, 'interruption')}, {counted(run.replans, 'new plan')} and "
        f"{counted(run.lost_steps, 'step', ',')} repeated"
    )
    if beside is None:
        return figures
    on_demand = f"{choice_text(beside)} on demand"
    return f"{'pays here' if simulated.pays else 'does not pay here'}: {figures}; compared with {on_demand}"


def answer_values(answer: PoolAnswer) -> dict[str, Any]:
    """The keys that a pool adds to a plan's JSON."""
    return {
        "choices": [_values(answer, choice) for choice in answer.choices],
        "recommended": answer.recommended,
        "objective": answer.aims.objective,
        "left_out_of_pool": list(answer.left_out),
    }


def _values(answer: PoolAnswer, choice: PoolChoice) -> dict[str, Any]:
    money = choice.money
    parts = None if money is None else {"devices": money.devices, "egress": money.egress, "restarts": money.restarts}
    return {
        "devices": choice.selection.by_zone(),
        "purchase": choice.purchase,
        "layout": choice.layout,
        "precision": choice.precision,
        "step_s": choice.step_s,
        "days": choice.days,
        "cost": choice.cost,
        "cost_parts": parts,
        "currency": answer.pool.currency,
        "tokens_per_cost": choice.tokens_per_cost,
        "assumed": list(choice.assumed),
        "why": answer.why(choice),
    }
