"""One way to take devices from a pool for a whole run: its time, its cost, and whether it meets the aims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from plait.errors import PlaitError
from plait.machines.pool import Pool
from plait.planner.pools.egress import ZonePair, egress_cost
from plait.planner.pools.selection import Selection
from plait.planner.search.found import Search

Objective = Literal["fastest", "cheapest", "balanced"]
"""The shortest run; the cheapest; the one with the least product of time and cost."""
Purchase = Literal["on demand", "spot"]
""""spot": every device that the pool has a spot price for is a spot machine."""

SAME = 0.01
"""Choices whose time or cost differs by less than this share count as equal, and the other figure decides."""
INTERRUPTION_LOSS_S = 600.0
"""Seconds that an interruption costs a run: getting a machine again, starting, and repeating the steps since the
last checkpoint. A judgement, because published figures differ."""
DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Aims:
    """The objective of a choice, and the bounds that it has to meet; None: no bound."""

    objective: Objective
    deadline_s: float | None = None
    max_cost: float | None = None
    min_tokens_per_s: float | None = None

    @property
    def needs_prices(self) -> bool:
        return self.objective != "fastest" or self.max_cost is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The amount of work, which does not depend on the devices."""

    steps: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMoney:
    """The cost of a run, in the pool's currency."""

    devices: float
    """The price of the devices' time, without interruptions."""
    egress: float
    """Traffic between zones."""
    restarts: float
    """The price of the time that interruptions of spot machines add."""

    @property
    def total(self) -> float:
        return self.devices + self.egress + self.restarts


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChoice:
    """Devices of a pool with their best layout, and the time and cost of the whole run on them."""

    selection: Selection
    purchase: Purchase
    work: Work
    step_s: float
    wall_s: float
    """For the whole run, including the time that interruptions of spot machines add."""
    money: RunMoney | None
    """None if a device has no price."""
    layout: str
    """The layout in words."""
    precision: str
    search: Search | None = field(default=None, compare=False, repr=False)
    """The search that found the layout."""

    @property
    def cost(self) -> float | None:
        return None if self.money is None else self.money.total

    @property
    def tokens_per_s(self) -> float:
        return self.work.tokens / self.wall_s

    @property
    def tokens_per_cost(self) -> float | None:
        """Tokens per unit of the currency."""
        return self.work.tokens / self.cost if self.cost else None

    @property
    def days(self) -> float:
        return self.wall_s / DAY_S

    @property
    def assumed(self) -> tuple[str, ...]:
        """Assumptions in place of values that were not given, a phrase each."""
        phrases = [phrase for entry, _ in self.selection.taken for phrase in entry.assumed]
        if self.purchase == "spot":
            phrases += [phrase for entry, _ in self.selection.taken for phrase in entry.spot_assumed]
            phrases.append(f"{INTERRUPTION_LOSS_S / 60:.0f} minutes lost at each interruption")
        phrases += [phrase for link in self.selection.links for phrase in link.assumed]
        return tuple(dict.fromkeys(phrases))


def choices_of(
    selection: Selection,
    work: Work,
    *,
    step_s: float,
    layout: str,
    precision: str,
    sent: dict[ZonePair, float],
    search: Search | None = None,
) -> list[PoolChoice]:
    """The ways to pay for these devices: on demand, and as spot machines if the pool has prices for them. `sent`
    gives the bytes of a step between zones."""
    hours = work.steps * step_s / 3600
    entries = selection.taken
    links = {frozenset(link.zones): link.egress_price for link in selection.links}
    egress = work.steps * egress_cost(sent, links)
    purchases: list[Purchase] = ["on demand"]
    if any(entry.spot_price is not None for entry, _ in entries):
        purchases.append("spot")
    found = list[PoolChoice]()
    for purchase in purchases:
        lost = selection.spot_nodes_per_day * INTERRUPTION_LOSS_S / DAY_S if purchase == "spot" else 0.0
        if lost >= 1:  # the machine is taken back before the run has caught up
            continue
        longer = 1 / (1 - lost)
        prices = [
            entry.spot_price if purchase == "spot" and entry.spot_price is not None else entry.price
            for entry, _ in entries
        ]
        money = None
        if (rate := _rate(prices, [count for _, count in entries])) is not None:
            money = RunMoney(devices=rate * hours, egress=egress, restarts=rate * hours * (longer - 1))
        found.append(
            PoolChoice(
                selection=selection,
                purchase=purchase,
                work=work,
                step_s=step_s,
                wall_s=hours * 3600 * longer,
                money=money,
                layout=layout,
                precision=precision,
                search=search,
            )
        )
    return found


def _rate(prices: Sequence[float | None], counts: Sequence[int]) -> float | None:
    """The price of an hour of all devices; None if one has no price."""
    known = [price * count for price, count in zip(prices, counts, strict=True) if price is not None]
    return sum(known) if len(known) == len(counts) else None


def check_prices(pool: Pool, aims: Aims) -> None:
    """Raise PlaitError if money matters and a device has no price in the pool or the catalogue."""
    lacking = dict.fromkeys(entry.device.name for entry in pool.devices if entry.price is None)
    if aims.needs_prices and lacking:
        what = "plan.max_cost" if aims.objective == "fastest" else f'plan.objective = "{aims.objective}"'
        names = " and ".join(lacking)
        raise PlaitError(
            f"{what} needs prices in {pool.currency}, and neither the pool nor the catalogue has one for {names}; add "
            f"price, per device and hour, to each of its [[device]], or write "
            f'plan.objective = "fastest" without plan.max_cost'
        )


def missing(choice: PoolChoice, aims: Aims) -> dict[str, float]:
    """The bounds that a choice misses, each with the share by which it does."""
    bounds = {
        "plan.deadline": (choice.wall_s, aims.deadline_s),
        "plan.max_cost": (inf if choice.cost is None else choice.cost, aims.max_cost),
        "plan.min_tokens_per_s": (1 / choice.tokens_per_s, aims.min_tokens_per_s and 1 / aims.min_tokens_per_s),
    }
    excess = {key: value / bound - 1 for key, (value, bound) in bounds.items() if bound}
    return {key: share for key, share in excess.items() if share > 0}


def objective_value(choice: PoolChoice, objective: Objective) -> float:
    """The value that the objective minimizes; infinite if it needs an unknown price."""
    cost = inf if choice.cost is None else choice.cost
    return {"fastest": choice.wall_s, "cheapest": cost, "balanced": choice.wall_s * cost}[objective]


def rank(choice: PoolChoice, aims: Aims) -> tuple[float, float]:
    """Key for comparing choices: first by how far bounds are missed, then by the objective."""
    return sum(missing(choice, aims).values()), objective_value(choice, aims.objective)


def best_choice(choices: Sequence[PoolChoice], aims: Aims) -> PoolChoice:
    """The choice that meets the bounds and serves the objective best, or else misses the bounds least. Of choices
    within SAME of the best, the cheapest (the fastest, if the objective is the cheapest), then the one with the
    fewest devices."""
    misses = min(rank(choice, aims)[0] for choice in choices)
    near = [choice for choice in choices if rank(choice, aims)[0] <= misses]
    least = min(objective_value(choice, aims.objective) for choice in near)
    same = [choice for choice in near if objective_value(choice, aims.objective) <= (1 + SAME) * least]

    def key(choice: PoolChoice) -> tuple[float, int, str]:
        other = choice.wall_s if aims.objective == "cheapest" else inf if choice.cost is None else choice.cost
        return other, choice.selection.n_devices, choice.purchase

    return min(same, key=key)


def frontier(choices: Sequence[PoolChoice]) -> list[PoolChoice]:
    """The choices that no other beats, the fastest first. Priced choices are compared by time and cost. Choices of
    unknown cost must be faster than all priced ones, and are compared by time and number of devices."""
    priced = [one for one in choices if one.cost is not None]
    fastest_s = min((one.wall_s for one in priced), default=inf)
    unpriced = [one for one in choices if one.cost is None and one.wall_s < (1 - SAME) * fastest_s]
    return [
        *_unbeaten(unpriced, lambda one: one.selection.n_devices),
        *_unbeaten(priced, lambda one: one.cost or 0.0),
    ]


def _unbeaten(choices: Sequence[PoolChoice], second: Callable[[PoolChoice], float]) -> list[PoolChoice]:
    """The choices that no other beats in both time and a second figure, the fastest first."""
    found, least = list[PoolChoice](), inf
    for choice in sorted(choices, key=lambda one: (one.wall_s, second(one), one.selection.n_devices)):
        if second(choice) < least:
            found.append(choice)
            least = second(choice)
    return found
