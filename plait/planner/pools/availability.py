"""A run on spot machines that come and go: simulated change by change, with a new selection at each.

An availability file is CSV with the columns minute, zone, device and count: from that minute on, the zone has that many
of the device. Each entry of the pool starts at minute 0. If the run takes longer than the file, the file repeats.
"""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from plait.errors import PlaitError
from plait.machines.catalog import find_device
from plait.machines.pool import Pool
from plait.planner.pools.choice import DAY_S, INTERRUPTION_LOSS_S, Aims, PoolChoice, objective_value, rank
from plait.planner.pools.exploring import PriceSelection
from plait.planner.pools.selection import DeviceCounts

AVAILABILITY_COLUMNS = ("minute", "zone", "device", "count")
MOST_ROWS = 100_000
MOST_CHANGES_SIMULATED = 200_000
"""After this many changes, a run counts as endless."""
GENERATED_MINUTES = 1440
GENERATED_EVERY_MINUTES = 60
LEAST_SHARE_GENERATED = 0.25
"""The smallest share of a zone's devices, as in a day's trace of a cloud (32 of 128 in Sailor, SOSP 2025)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """How many devices each entry of a pool has after each change."""

    starts_s: tuple[float, ...]
    """When each state begins; the first at 0."""
    states: tuple[DeviceCounts, ...]
    period_s: float
    """After this time the first state follows the last one again."""
    source: str

    @property
    def mean_state_s(self) -> float:
        """How long a state lasts on average."""
        return self.period_s / len(self.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A run on machines that came and went."""

    wall_s: float
    cost: float
    interruptions: int
    """Changes that took away a machine in use."""
    replans: int
    """Changes of the selection, including those after interruptions."""
    lost_steps: int
    """Steps that were repeated."""
    idle_s: float
    """Time in which no available selection holds the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedChoice:
    """A simulated run, and the best on-demand choice to compare it with."""

    run: SimulatedRun
    beside: PoolChoice | None
    """None if no selection has an on-demand price."""
    availability: Availability
    currency: str

    @property
    def pays(self) -> bool | None:
        """Whether spot machines cost less; None if there is nothing to compare with."""
        return None if self.beside is None or self.beside.cost is None else self.run.cost < self.beside.cost


def read_availability(text: str, where: str, pool: Pool) -> Availability:
    """Read an availability file's text for a pool; raises PlaitError with the line that is wrong."""
    rows = _rows(text, where)
    header = [name.strip() for name in next(rows, [])]
    if header != list(AVAILABILITY_COLUMNS):
        raise PlaitError(f"{where} must begin with the line {','.join(AVAILABILITY_COLUMNS)}")
    by_entry: list[dict[float, int]] = [{} for _ in pool.devices]
    for number, row in enumerate(rows, 2):
        if not row:
            continue
        if number > MOST_ROWS:
            raise PlaitError(f"{where} has more than {MOST_ROWS} lines; shorten it")
        minute, place, count = _row(row, f"{where}, line {number}", pool)
        if minute in by_entry[place]:
            raise PlaitError(f"{where}, line {number}: minute {minute:g} of this device appears twice; leave one out")
        by_entry[place][minute] = count
    return _availability(by_entry, pool, where)


def _rows(text: str, where: str) -> Iterator[list[str]]:
    try:
        yield from csv.reader(io.StringIO(text, newline=None))
    except csv.Error as error:
        raise PlaitError(f"{where} is not CSV: {error}; write {','.join(AVAILABILITY_COLUMNS)} on each line") from None


def generated_availability(seed: int, pool: Pool) -> Availability:
    """A day in which each entry of a pool has between a quarter and all of its devices, drawn again every hour."""
    drawn = random.Random(seed)
    by_entry: list[dict[float, int]] = []
    for entry in pool.devices:
        least = max(1, round(LEAST_SHARE_GENERATED * entry.nodes))
        minutes = range(0, GENERATED_MINUTES + 1, GENERATED_EVERY_MINUTES)
        by_entry.append({float(minute): drawn.randint(least, entry.nodes) * entry.per_node for minute in minutes})
    return _availability(by_entry, pool, f"availability drawn with seed {seed}")


def _row(row: Sequence[str], where: str, pool: Pool) -> tuple[float, int, int]:
    if len(row) != len(AVAILABILITY_COLUMNS):
        raise PlaitError(f"{where} has {len(row)} values; write {','.join(AVAILABILITY_COLUMNS)}")
    minute_text, zone, name, count_text = (value.strip() for value in row)
    try:
        minute, count = float(minute_text), int(count_text)
    except ValueError:
        raise PlaitError(f"{where}: minute and count must be numbers, not {minute_text!r} and {count_text!r}") from None
    if not 0 <= minute < inf or count < 0:
        raise PlaitError(f"{where}: minute = {minute_text} and count = {count_text} must not be negative or infinite")
    device = find_device(name)
    for place, entry in enumerate(pool.devices):
        if (entry.zone, entry.device.name) == (zone, device.name):
            return minute, place, count
    raise PlaitError(f"{where}: the pool has no {device.name} in zone {zone}; add it there, or leave the line out")


def _availability(by_entry: Sequence[dict[float, int]], pool: Pool, where: str) -> Availability:
    for entry, changes in zip(pool.devices, by_entry, strict=True):
        if 0.0 not in changes:
            since = f"before minute {min(changes):g}" if changes else "at all"
            raise PlaitError(
                f"{where} does not mention {entry.device.name} in zone {entry.zone} {since}; add a line for minute 0"
            )
    minutes = sorted({minute for changes in by_entry for minute in changes})
    last = minutes[-1]
    states, now = list[DeviceCounts](), [0] * len(pool.devices)
    starts = minutes[:-1] if len(minutes) > 1 else minutes
    for minute in starts:
        for place, changes in enumerate(by_entry):
            now[place] = min(changes.get(minute, now[place]), pool.devices[place].count)
        states.append(tuple(now))
    return Availability(
        starts_s=tuple(60 * minute for minute in starts),
        states=tuple(states),
        period_s=60 * last if len(minutes) > 1 else inf,
        source=where,
    )


def simulate_spot_run(
    pool: Pool,
    explored: Sequence[PoolChoice],
    price: PriceSelection,
    price_bound: PriceSelection,
    availability: Availability,
    aims: Aims,
    checkpoint_s: float,
) -> SimulatedRun:
    """Simulate a run on the pool's spot machines. At each change it moves to the best available selection if that is
    worth a restart; unsaved steps are repeated. Raises PlaitError if the run would never end."""
    choose = _Chooser(pool, explored, price, price_bound, aims)
    work = explored[0].work
    here: PoolChoice | None = None
    clock = done = saved_at = cost = idle = 0.0
    interruptions = replans = lost = 0
    ready_at = 0.0  # when the present selection computes
    for number in range(MOST_CHANGES_SIMULATED):
        state = availability.states[number % len(availability.states)]
        until = _end_of_state(availability, number)
        best = choose(state)
        taken_away = here is not None and any(
            used > there for used, there in zip(here.selection.counts, state, strict=True)
        )
        if taken_away:
            interruptions += 1
            lost += round(done - saved_at)
            done = saved_at
        if _counts(here) != _counts(best) and (
            taken_away or here is None or _is_worth_it(here, best, availability, aims)
        ):
            replans += int(here is not None)
            ready_at = clock + (INTERRUPTION_LOSS_S if here is not None or number else 0.0)
            here, saved_at = best, done
        if here is None:
            idle += until - clock
            clock = until
            if clock == inf:
                break
            continue
        rate = (here.money.devices + here.money.egress) / (work.steps * here.step_s) if here.money else 0.0
        computing_from = min(max(clock, ready_at), until)
        possible = (until - computing_from) / here.step_s
        if done + possible >= work.steps:
            end = computing_from + (work.steps - done) * here.step_s
            return SimulatedRun(
                wall_s=end,
                cost=cost + rate * (end - clock),
                interruptions=interruptions,
                replans=replans,
                lost_steps=lost,
                idle_s=idle,
            )
        done += possible
        between_saves = max(1.0, checkpoint_s / here.step_s)
        saved_at = max(saved_at, done - (done - saved_at) % between_saves)
        cost += rate * (until - clock)
        clock = until
    raise PlaitError(
        f"with {availability.source} the run never ends: after {clock / DAY_S:.0f} days {done / work.steps:.0%} of its "
        "steps are done; choose a smaller train.budget, or a pool with more available machines"
    )


class _Chooser:
    """Finds the best spot selection of the available devices, once for each state."""

    def __init__(
        self, pool: Pool, explored: Sequence[PoolChoice], price: PriceSelection, price_bound: PriceSelection, aims: Aims
    ) -> None:
        self._pool, self._price, self._price_bound, self._aims = pool, price, price_bound, aims
        self._known = [one for one in explored if one.purchase == "spot"]
        self._by_state: dict[DeviceCounts, PoolChoice | None] = {}

    def __call__(self, state: DeviceCounts) -> PoolChoice | None:
        if state not in self._by_state:
            fits = [one for one in self._known if _fits(one.selection.counts, state)]
            best = min(fits, key=self._rank, default=None)
            for counts in self._all_there(state):
                if best is None or self._least(self._price_bound(counts)) < self._rank(best):
                    found = [one for one in self._price(counts) if one.purchase == "spot"]
                    best = min([*found, *([best] if best else [])], key=self._rank, default=None)
            self._by_state[state] = best
        return self._by_state[state]

    def _rank(self, choice: PoolChoice) -> tuple[float, float]:
        return rank(choice, self._aims)

    def _least(self, choices: Sequence[PoolChoice]) -> tuple[float, float]:
        return min((self._rank(one) for one in choices if one.purchase == "spot"), default=(inf, inf))

    def _all_there(self, state: DeviceCounts) -> list[DeviceCounts]:
        """All available devices of each kind, then all devices together."""
        whole = tuple(
            max(size for size in (0, *entry.sizes) if size <= there)
            for entry, there in zip(self._pool.devices, state, strict=True)
        )
        kinds = dict.fromkeys(entry.device.name for entry in self._pool.devices)
        each = [
            tuple(
                count if entry.device.name == kind else 0
                for entry, count in zip(self._pool.devices, whole, strict=True)
            )
            for kind in kinds
        ]
        return [counts for counts in dict.fromkeys((*each, whole)) if any(counts)]


def _counts(choice: PoolChoice | None) -> DeviceCounts:
    return choice.selection.counts if choice else ()


def _fits(counts: DeviceCounts, state: DeviceCounts) -> bool:
    return all(used <= there for used, there in zip(counts, state, strict=True))


def _end_of_state(availability: Availability, number: int) -> float:
    rounds, place = divmod(number, len(availability.states))
    if place + 1 < len(availability.starts_s):
        return rounds * availability.period_s + availability.starts_s[place + 1]
    return (rounds + 1) * availability.period_s


def _is_worth_it(here: PoolChoice, best: PoolChoice | None, availability: Availability, aims: Aims) -> bool:
    """Whether the gain of a better selection, over the usual length of a state, outweighs a restart."""
    if best is None:
        return False
    if rank(here, aims)[0] > rank(best, aims)[0]:  # as it is, the run would miss a bound
        return True
    gain = 1 - objective_value(best, aims.objective) / objective_value(here, aims.objective)
    return gain * min(availability.mean_state_s, DAY_S) > INTERRUPTION_LOSS_S
