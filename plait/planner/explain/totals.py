"""What the whole run comes to: steps, hours, device-hours, energy, money."""

from __future__ import annotations

from plait.planner.derive.intervals import steps_in_budget
from plait.planner.search.found import Search
from plait.units import Amount, counted, format_count, format_duration, format_si

JOULES_PER_WH = 3600


def run_totals(found: Search, budget: Amount) -> list[str]:
    """The run's costs, a sentence each; what no public figure tells is said."""
    step_s, cluster = float(found.step_s[found.chosen]), found.cluster
    steps = steps_in_budget(budget, found.workload.batch_tokens, step_s=step_s)
    seconds = steps * step_s
    hours = seconds / 3600
    lines = [
        f"{counted(steps, 'step', ',')}, {format_count(steps * found.workload.batch_tokens)} tokens, for a "
        f"budget of {budget}: "
        f"{_long(seconds)}, {format_count(hours * cluster.hour_devices)} device-hours"
    ]
    if cluster.watts is None:
        lines.append(f"energy: unknown, because no board power of {_without(found, 'watts')} is published")
    else:
        energy = format_si(cluster.watts * seconds / JOULES_PER_WH, "Wh")
        lines.append(f"energy: {energy} at full board power; hosts, switches and cooling come on top")
    if cluster.price_per_hour is None:
        lines.append(
            f"money: unknown, because no public price of {_without(found, 'price_per_hour')} is in the catalogue"
        )
    else:
        usd = cluster.price_per_hour * hours
        amount = f"${format_count(usd)}" if usd >= 0.01 else "less than $0.01"
        lines.append(f"money: {amount} at public on-demand prices")
    return lines


def _long(seconds: float) -> str:
    days = seconds / 86400
    return f"{days:.1f} days" if days >= 2 else format_duration(seconds)


def _without(found: Search, what: str) -> str:
    names = [
        island.device.name
        for island in found.cluster.islands
        if (island.device.watts if what == "watts" else island.device.price_per_hour) is None
    ]
    return " and ".join(dict.fromkeys(names))
