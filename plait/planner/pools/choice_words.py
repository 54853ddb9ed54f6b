"""Choices in words: what they take, what they cost, and how two of them differ."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from plait.planner.pools.choice import Aims, Objective, PoolChoice
from plait.planner.pools.selection import Selection
from plait.units import format_days, plain_number


def money_text(amount: float, currency: str) -> str:
    """An amount of money: "$21,000", "412 EUR", "$3.20"."""
    if 0 < amount < 0.01:
        return "less than $0.01" if currency == "USD" else f"less than 0.01 {currency}"
    digits = f"{amount:.2f}" if amount < 100 else plain_number(amount)
    return f"${digits}" if currency == "USD" else f"{digits} {currency}"


def cost_text(choice: PoolChoice) -> str:
    """What a choice costs."""
    return "unknown" if choice.cost is None else money_text(choice.cost, choice.selection.pool.currency)


def selection_text(selection: Selection) -> str:
    """The devices, compared with the whole pool: "64 of your 256 A100 SXM 40GB"."""
    pool, parts = selection.pool, list[str]()
    names = dict.fromkeys(entry.device.name for entry, _ in selection.taken)
    for name in names:
        taken = sum(count for entry, count in selection.taken if entry.device.name == name)
        there = sum(entry.count for entry in pool.devices if entry.device.name == name)
        if there == 1:
            parts.append(f"your {name}")
        else:
            parts.append(f"all {there} {name}" if taken == there else f"{taken} of your {there} {name}")
    text = " and ".join(parts)
    if len(pool.zones) == 1:
        return text
    return f"{text} in {' and '.join(selection.zones)}"


def choice_text(choice: PoolChoice) -> str:
    """Devices, time and cost of a choice in a phrase."""
    money = "" if choice.cost is None else f" and {cost_text(choice)}"
    spot = ", as spot machines" if choice.purchase == "spot" else ""
    return f"{selection_text(choice.selection)}{spot}: {format_days(choice.wall_s)}{money}"


def contrast_text(best: PoolChoice, others: Sequence[PoolChoice], objective: Objective) -> str:
    """Compares the recommended choice with the fastest one, or with the cheapest if it is itself the fastest."""
    if not others:
        return ""
    fastest = min(others, key=lambda one: one.wall_s)
    if fastest.wall_s < best.wall_s and objective != "fastest":
        cost = "" if fastest.cost is None else f" for {cost_text(fastest)}"
        return f"{_named(fastest)} would be done in {format_days(fastest.wall_s)}{cost}"
    priced = [one for one in others if one.cost is not None and best.cost is not None and one.cost < best.cost]
    if not priced:
        return ""
    cheapest = min(priced, key=lambda one: one.cost or 0.0)
    return f"{_named(cheapest)} would cost {cost_text(cheapest)} and take {format_days(cheapest.wall_s)}"


def _named(choice: PoolChoice) -> str:
    return f"{selection_text(choice.selection)}{' as spot machines' if choice.purchase == 'spot' else ''}"


def nearest_text(choice: PoolChoice, best: PoolChoice, missed: Collection[str], error: float) -> str:
    """What another choice gains and gives up compared with the recommended one, and which bounds it misses.
    Differences of at most `error`, a share, are left out: the forecast cannot tell them."""
    parts = list[str]()
    faster, longer = best.wall_s - choice.wall_s, choice.wall_s - best.wall_s
    if not _is_about(choice.wall_s, best.wall_s, error):
        parts.append(f"{format_days(faster)} sooner" if faster > 0 else f"{format_days(longer)} later")
    if choice.cost is not None and best.cost is not None and not _is_about(choice.cost, best.cost, error):
        word = "more" if choice.cost > best.cost else "less"
        currency = choice.selection.pool.currency
        parts.append(f"{money_text(abs(choice.cost - best.cost), currency)} {word}")
    if missed:
        parts.append(f"misses {' and '.join(missed)}")
    return ", ".join(parts) or "no difference that a forecast can tell"


def _is_about(one: float, other: float, error: float) -> bool:
    """Whether two figures differ by no more than this share."""
    return max(one, other) <= (1 + error) * min(one, other)


def bound_text(key: str, aims: Aims, currency: str) -> str:
    """A bound as the user gave it."""
    if key == "plan.deadline":
        assert aims.deadline_s is not None
        return f"{key} = {format_days(aims.deadline_s)}"
    if key == "plan.max_cost":
        assert aims.max_cost is not None
        return f"{key} = {money_text(aims.max_cost, currency)}"
    assert aims.min_tokens_per_s is not None
    return f"{key} = {plain_number(aims.min_tokens_per_s)}"
