"""How a machine is used: the planner's layout for each number of workers that is worth a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from plait.errors import PlaitError
from plait.layout import AXES, Layout
from plait.planner.calibration.factors import step_items
from plait.planner.derive.intervals import balance_every_steps
from plait.planner.derive.micro_batch import MORE_COSTS, fewer_gatherings, micros_to_price, usual_micro
from plait.planner.derive.resources import STAND_IN, digest_of
from plait.planner.explain.report import in_short, runners_up
from plait.planner.explain.unequal_devices import limit_words, shares_of
from plait.planner.heterogeneous.batch_shares import equal_shares
from plait.planner.heterogeneous.host_permutations import node_alone
from plait.planner.plan import Forecast
from plait.planner.resolve.constraints import pins_of
from plait.planner.resolve.named_layout import asked_search, named_pins
from plait.planner.resolve.request import Question
from plait.planner.search.cost_breakdown import time_items
from plait.planner.search.enumeration import Pins
from plait.planner.search.layout_kinds import Row
from plait.planner.search.search import DoesNotFit, Search, search
from plait.planner.search.validity import (
    check_devices,
    check_layout,
    check_shares,
    layout_from,
    layout_of,
    named_degrees,
)

MEASURED_TOLERANCE = 0.05
"""A simpler split may be so much slower than the fastest where both were timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to use a machine, what the planner expects of it, and how long a step took (None: not timed)."""

    layout: Layout
    threads: int
    micro_sequences: int
    micro_limits: tuple[int, ...] = ()
    """Of each part of the batch, where devices' memories differ too much for one number; else none."""
    shares: tuple[int, ...] = ()
    """Of each part of the batch, in sequences; none where they are as equal as can be."""
    seats: tuple[int, ...] = ()
    """Of each place in the order of ranks the number of the host that takes it; none: as they stand."""
    points: int
    """Of complexity (plait plan --terms)."""
    forecast: Forecast | None
    why: tuple[str, ...]
    step_s: float | None = None

    @property
    def workers(self) -> int:
        return self.layout.world_size


def candidate_splits(question: Question, why: list[str]) -> tuple[Split, ...]:
    """The splits worth a measurement: one where degrees are named or the devices decide. Raises PlaitError."""
    grounds, named = question.grounds, named_degrees(question.config)
    if not grounds.known:
        why.append(f"{grounds.machine.name} is not in plait's catalogue: laid out as an {STAND_IN} with its memory")
    splits = (_as_named(question, named, why),) if named else _chosen(question)
    for key, axis in (("schedule", "pipeline"), ("virtual_stages", "pipeline"), ("shard_what", "shard")):
        if getattr(question.config.layout, key) != "auto" and all(s.layout.degrees[axis] == 1 for s in splits):
            why.append(f"layout.{key} changes nothing: layout.{axis} is 1")
    return splits


def simplest(measured: Sequence[Split]) -> Split:
    """The simplest of those that are about as fast as the fastest; of equally simple ones the fastest."""
    if any(split.step_s is None for split in measured):
        return measured[0]
    limit = min(split.step_s or 0.0 for split in measured) * (1 + MEASURED_TOLERANCE)
    enough = [split for split in measured if (split.step_s or 0.0) <= limit]
    return min(enough, key=lambda split: (split.points, split.workers > 1, split.step_s))


def _as_named(question: Question, named: dict[str, int], why: list[str]) -> Split:
    config, grounds, shape = question.config, question.grounds, question.shape
    machine, given = grounds.machine, grounds.given
    layout = layout_of(config, shape, named)
    if given and given.workers != layout.world_size:
        raise PlaitError(
            f"torchrun started {given.workers} workers and the layout needs {layout.world_size}; "
            f"start torchrun with --nproc-per-node {layout.world_size}"
        )
    if not given:
        check_devices(layout, machine)
    check_layout(layout, shape, sequence=shape.sequence, batch_sequences=question.batch_sequences)
    check_shares(pins_of(config).shares, layout, question.batch_sequences)
    if not given and machine.device == "cpu" and layout.world_size > machine.cores:
        why.append(f"{layout.world_size} workers on {machine.cores} cores: as asked, though they will take turns")
    return _split(question, named_pins(config, layout), layout.world_size, layout)


def _chosen(question: Question) -> tuple[Split, ...]:
    """The planner's choice for every number of workers that the machine can have."""
    pins, splits = pins_of(question.config), []
    refusal: PlaitError | None = None
    for workers in question.grounds.worker_counts():
        try:
            splits.append(_split(question, pins, workers, None))
        except PlaitError as error:
            refusal = refusal or error
    if not splits:
        assert refusal is not None
        raise refusal
    return tuple(split for split in splits if not any(_outdone(split, other) for other in splits))


def _outdone(split: Split, other: Split) -> bool:
    """Whether another split is simpler and, as far as a forecast can tell, faster."""
    if split.forecast is None or other.forecast is None or other.points >= split.points:
        return False
    return other.forecast.step_s * (1 + other.forecast.error) < split.forecast.step_s


def best_splits(question: Question, count: int) -> tuple[Split, ...]:
    """Splits worth a trial: the planner's choices, and of other kinds those that it expects most of."""
    chosen = candidate_splits(question, [])
    if named_degrees(question.config):
        return chosen
    pins, others = pins_of(question.config), list[Split]()
    for workers in {split.workers for split in chosen}:
        one = asked_search(question.workload, question.grounds.cluster(workers), question.stack, pins)
        others += [_priced(question, pins, one, at, None) for at in runners_up(one, count)]
    known = [split.layout for split in chosen]
    fresh = [split for split in others if split.layout not in known]
    return (*_by_forecast(chosen), *_by_forecast(fresh))[:count]


def _by_forecast(splits: Sequence[Split]) -> list[Split]:
    return sorted(splits, key=lambda split: split.forecast.step_s if split.forecast else 0.0)


def _split(question: Question, pins: Pins, workers: int, layout: Layout | None) -> Split:
    """The split of a layout that was named, or of the one that the planner chooses, with its forecast."""
    cluster = question.grounds.cluster(workers)
    found = asked_search(question.workload, cluster, question.stack, pins)
    split = _priced(question, pins, found, found.chosen, layout)
    return replace(split, why=(*in_short(found), *split.why))


def _priced(question: Question, pins: Pins, found: Search, at: int, layout: Layout | None) -> Split:
    row, workers, turned = found.candidates.row(at), found.cluster.devices, found.turned
    why: list[str] = []
    cut = found.stage_layers(at) if int(row["pipeline"]) > 1 else ()
    layout = _as_priced(layout, layout_from(row, cut)) if layout else layout_from(row, cut)
    if question.grounds.machine.device == "cpu" and "micro_sequences" not in pins.knobs:
        found, at, why = _settled(question, layout, found, at, pins)
    limits = found.at_once(at)
    return Split(
        layout=layout,
        threads=question.grounds.threads(workers),
        micro_sequences=max(limits),
        micro_limits=limits if len(limits) > 1 else (),
        shares=shares_of(found, at),
        seats=turned.places if turned else (),
        points=int(found.points[at]),
        forecast=_forecast(question, found, at) if question.grounds.known else None,
        why=(*limit_words(found, at), *why),
    )


def _as_priced(named: Layout, priced: Layout) -> Layout:
    """The layout of named degrees with what the recipe leaves open: as it was priced."""
    what = priced.shard_what if named.shard > 1 else named.shard_what
    return replace(named, stage_layers=priced.stage_layers, recompute=priced.recompute, shard_what=what)


def _forecast(question: Question, found: Search, at: int) -> Forecast:
    fullest = found.fullest(at)
    return Forecast(
        step_s=float(found.step_s[at]),
        tensor_bytes=float(fullest.allocated[0]),
        bytes_per_device=float(fullest.reserved[0]),
        one_device_step_s=_one_device_step_s(found),
        error=found.tolerance,
        basis=question.basis,
        items=step_items(time_items(found, at)),
        calibration=found.stack.calibration,
        probed=digest_of(question.grounds.described),
        lookup_layers=found.dealer.devices.lookup,
        head_layers=found.dealer.devices.head,
    )


def _one_device_step_s(found: Search) -> float | None:
    """What a step would take on the first of the devices alone."""
    try:
        alone = search(found.workload, node_alone(found.cluster, 0, 1), stack=found.stack)
    except PlaitError:
        return None
    return float(alone.step_s[alone.fastest])


def _settled(question: Question, layout: Layout, found: Search, at: int, asked: Pins) -> tuple[Search, int, list[str]]:
    """The same with as many sequences at a time as suit a processor, and why where these are more than usual.

    Where they do not fit, with what was found.
    """
    batch, row = question.batch_sequences, found.candidates.row(at)
    uneven = shares_of(found, at)
    shares = uneven or equal_shares(batch, layout.batch_parts)
    grows = bool(uneven) and balance_every_steps(question.config, "unequal") > 0
    usual = usual_micro(batch, layout, question.shape)
    best, taken = found, 0
    for size in micros_to_price(usual, layout, shares, may_grow=grows):
        with suppress(DoesNotFit):
            one = search(question.workload, found.cluster, stack=found.stack, pins=_pins(row, size, asked))
            if not taken or one.step_s[one.chosen] < (1 - MORE_COSTS) * best.step_s[best.chosen]:
                best, taken = one, size
    why = fewer_gatherings(usual, taken, max(shares)) if taken > usual else []
    return best, best.chosen if taken else at, why


def _pins(row: Row, micro_sequences: int, asked: Pins) -> Pins:
    knobs = {name: row[name] for name in ("virtual", "schedule", "recompute")}
    split = {"shard_what": row["shard_what"]} if row["shard_what"] != "nothing" else {}
    degrees = {axis: int(row[axis]) for axis in AXES}
    return Pins(
        degrees=degrees,
        knobs={**knobs, **split},
        stage_layers=asked.stage_layers,
        shares=asked.shares,
        at_once=micro_sequences,
    )
