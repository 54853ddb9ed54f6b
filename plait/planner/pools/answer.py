"""The answer to "which machines": priced choices from a pool, the one recommended, and why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from plait.errors import PlaitError
from plait.machines.pool import Pool
from plait.planner.derive.intervals import steps_in_budget
from plait.planner.derive.model_size import CorpusFacts, budget_of, chosen_size, has_open_size
from plait.planner.derive.published_rules import EXPECTED_MFU, training_flops_of_weights
from plait.planner.derive.training_job import SizedJob, rate_before_pricing, size_job
from plait.planner.pools.choice import (
    SAME,
    Aims,
    PoolChoice,
    best_choice,
    check_prices,
    frontier,
    missing,
    objective_value,
)
from plait.planner.pools.choice_words import (
    bound_text,
    choice_text,
    contrast_text,
    cost_text,
    nearest_text,
)
from plait.planner.pools.exploring import explore
from plait.planner.pools.pricing import PoolPricer, resources_of_selection
from plait.planner.pools.selection import Selection
from plait.planner.search.model_error import stated_error
from plait.recipe.schema import RunConfig
from plait.units import format_count, format_days, format_duration, parse_every

CHOICES_SHOWN = 6
"""The most choices that an answer lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAnswer:
    """The answer of `plait plan` for a pool."""

    pool: Pool
    aims: Aims
    choices: tuple[PoolChoice, ...]
    """The choices worth considering, the fastest first."""
    recommended: int
    """Index of the recommended one."""
    explored: tuple[PoolChoice, ...]
    """All priced choices; the picture shows them."""
    notes: tuple[str, ...]
    """How the job was sized, where it differs from a plan for given machines."""
    left_out: tuple[str, ...]
    """Why kinds of devices, zones and smaller selections are not used, one sentence each."""

    @property
    def best(self) -> PoolChoice:
        """The recommended choice."""
        return self.choices[self.recommended]

    @property
    def sentence(self) -> str:
        """The recommendation."""
        best, others = self.best, [one for one in self.choices if one is not self.best]
        contrast = contrast_text(best, others, self.aims.objective)
        return f"{choice_text(best)}{f'; {contrast}' if contrast else ''}"

    def why(self, choice: PoolChoice) -> str:
        """What a choice gives up or gains compared with the recommended one."""
        if choice is self.best:
            return self.purpose
        return nearest_text(choice, self.best, missing(choice, self.aims), forecast_error(choice, self.best))

    @property
    def purpose(self) -> str:
        """What makes the recommended choice the best."""
        aims, currency = self.aims, self.pool.currency
        what = {
            "fastest": "the fastest",
            "cheapest": "the cheapest",
            "balanced": "the best balance: least time multiplied by cost",
        }[aims.objective]
        bounds = [bound_text(key, aims, currency) for key in bounds_of(aims)]
        return f"{what} within {' and '.join(bounds)}" if bounds else what


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolJob:
    """A recipe's job with an amount of work that is the same for all choices."""

    config: RunConfig
    """The recipe with a budget in tokens or steps."""
    sized: SizedJob
    steps: int
    notes: tuple[str, ...]


def bounds_of(aims: Aims) -> list[str]:
    """The recipe keys of the bounds that are set."""
    bounds = {
        "plan.deadline": aims.deadline_s,
        "plan.max_cost": aims.max_cost,
        "plan.min_tokens_per_s": aims.min_tokens_per_s,
    }
    return [key for key, bound in bounds.items() if bound is not None]


def aims_of(config: RunConfig, pool: Pool) -> Aims:
    """The aims and bounds in a recipe; raises PlaitError if they involve money and a price is unknown."""
    asked = config.plan
    deadline_s = parse_every(asked.deadline).value or None
    has_prices = all(entry.price is not None for entry in pool.devices)
    if asked.objective != "auto":
        objective = asked.objective
    elif deadline_s is not None and asked.max_cost is None and has_prices:
        objective = "cheapest"
    else:
        objective = "balanced" if has_prices and asked.max_cost is None else "fastest"
    aims = Aims(
        objective=objective,
        deadline_s=deadline_s,
        max_cost=asked.max_cost,
        min_tokens_per_s=asked.min_tokens_per_s,
    )
    check_prices(pool, aims)
    return aims


def pool_job(config: RunConfig, corpus: CorpusFacts, pool: Pool) -> PoolJob:
    """The job for all choices. A time budget does not fix the amount of work, so it becomes the tokens that all devices
    are expected to train in that time."""
    everything = Selection(pool, tuple(entry.count for entry in pool.devices))
    rate = rate_before_pricing(resources_of_selection(everything.cluster))
    sized, notes = size_job(config, corpus, rate), tuple[str, ...]()
    if sized.job.budget.unit == "seconds":
        per_token = training_flops_of_weights(sized.job.shape)
        tokens = max(sized.job.batch_tokens, round(sized.job.budget.value * rate.flops_per_s / per_token))
        if sized.job.most_tokens is not None:
            tokens = min(tokens, sized.job.most_tokens)
        named = "the usual budget" if config.train.budget == "auto" else "train.budget"
        notes = (
            f"{named} of {format_duration(budget_of(config).value)} is a time, but choices are compared by the "
            f"same work: {format_count(tokens)} tokens, as many as all {everything.n_devices} devices would train in "
            f"that time at {EXPECTED_MFU:.0%} of their peak; train.budget in tokens or steps sets it",
        )
        size = chosen_size(config, corpus, rate) if has_open_size(config, corpus) else None
        config = _with_tokens(config, tokens, size)
        sized = size_job(config, corpus, rate)
    job = sized.job
    return PoolJob(
        config=config,
        sized=sized,
        steps=max(1, steps_in_budget(job.budget, job.batch_tokens, step_s=None)),
        notes=notes,
    )


def _with_tokens(config: RunConfig, tokens: int, size: str | None) -> RunConfig:
    """The recipe with a budget in tokens, and with a model size if plait chose one."""
    train = config.train.model_copy(update={"budget": f"{tokens} tokens"})
    updated: dict[str, object] = {"train": train}
    if size is not None:
        updated["model"] = config.model.model_copy(update={"size": size})
    return config.model_copy(update=updated)


def answer_of(job: PoolJob, pricer: PoolPricer, pool: Pool, aims: Aims) -> PoolAnswer:
    """Choose from a pool; raises PlaitError if nothing holds the job or meets the bounds."""
    try:
        explored = explore(pool, pricer.price, pricer.price_bound, aims)
    except PlaitError:
        if pricer.refusals:  # the one for the largest selection is the most useful
            raise pricer.refusals[-1] from None
        raise
    best = best_choice(explored, aims)
    if missed := missing(best, aims):
        bounds = " and ".join(bound_text(key, aims, pool.currency) for key in bounds_of(aims))
        needed = " and ".join(f"{key} = {_needed(key, best)}" for key in missed)
        raise PlaitError(
            f"nothing in {pool.name} meets {bounds}: the nearest is {choice_text(best)}; write {needed}, or a smaller "
            "train.budget"
        )
    shown = shown_choices(explored, best)
    return PoolAnswer(
        pool=pool,
        aims=aims,
        choices=tuple(shown),
        recommended=next(place for place, one in enumerate(shown) if one is best),
        explored=tuple(explored),
        notes=job.notes,
        left_out=tuple(_left_out(pool, explored, best, aims)),
    )


def _needed(key: str, choice: PoolChoice) -> str:
    """A value of the bound that a choice would meet, as written in a recipe."""
    if key == "plan.deadline":
        hours = -(-choice.wall_s // 3600)
        return f'"{hours:.0f} hours"'
    if key == "plan.max_cost":
        assert choice.cost is not None
        return f"{choice.cost * 1.005:.3g}" if choice.cost < 900 else f"{-(-choice.cost // 1):.0f}"
    return f"{choice.tokens_per_s * 0.995:.0f}"


def shown_choices(explored: Sequence[PoolChoice], best: PoolChoice) -> list[PoolChoice]:
    """A few of the choices that no other beats: the fastest, the cheapest, the best, and others that differ from these
    as much as possible; the fastest first. Each is faster or cheaper than the best, and cheaper than all that are
    faster, by more than the forecast's error."""
    least = log(1 + max(LEAST_DIFFERENCE, forecast_error(best)))
    known = [one for one in _clear_frontier(explored) if _distance(one, best) >= least and _has_gain(one, best)]
    kept = list(dict.fromkeys((*known[:1], *known[-1:])))
    rest = [one for one in known if one not in kept]
    while rest and len(kept) < CHOICES_SHOWN - 1:
        farthest = max(rest, key=lambda one: min(_distance(one, other) for other in (*kept, best)))
        if min(_distance(farthest, other) for other in (*kept, best)) < least:
            break
        kept.append(farthest)
        rest.remove(farthest)
    return sorted((*kept, best), key=lambda one: (one.wall_s, one.cost or 0.0))


LEAST_DIFFERENCE = 0.1
"""Of choices whose time and cost both differ by less than this share, or by less than the forecast's own error, only
one is worth a line."""


def forecast_error(*choices: PoolChoice) -> float:
    """The share by which forecasts of these choices may differ and count as equal; 0 if they were not forecast."""
    searches = [one.search for one in choices if one.search is not None]
    return max((stated_error(one.workload, one.cluster) for one in searches), default=0.0)


def _clear_frontier(explored: Sequence[PoolChoice]) -> list[PoolChoice]:
    """The choices that no other beats, without those that are slower than another and cheaper by less than the
    forecast's error."""
    clear = list[PoolChoice]()
    for one in frontier(explored):
        if not clear or clear[-1].cost is None or one.cost is None or _has_gain(one, clear[-1]):
            clear.append(one)
    return clear


def _has_gain(choice: PoolChoice, best: PoolChoice) -> bool:
    """Whether a choice takes less time or money than the best by more than the forecast's error."""
    if choice.cost is None or best.cost is None:
        return True
    more = 1 + forecast_error(choice, best)
    return choice.wall_s * more < best.wall_s or choice.cost * more < best.cost


def _distance(one: PoolChoice, other: PoolChoice) -> float:
    time = abs(log(one.wall_s / other.wall_s))
    return time if not one.cost or not other.cost else max(time, abs(log(one.cost / other.cost)))


def _left_out(pool: Pool, explored: Sequence[PoolChoice], best: PoolChoice, aims: Aims) -> list[str]:
    """For each kind of device that the best choice does not use, the best choice priced with it; likewise for each
    unused zone that has a kind in use. Then what is cheaper by less than the forecast's error."""
    lines = list[str]()
    kinds = dict.fromkeys(entry.device.name for entry in pool.devices)
    used = {entry.device.name for entry, _ in best.selection.taken}
    for kind in (kind for kind in kinds if kind not in used):
        with_it = [one for one in explored if any(entry.device.name == kind for entry, _ in one.selection.taken)]
        lines.append(_left_out_text(kind, with_it, best, aims))
    has_used_kind = dict.fromkeys(entry.zone for entry in pool.devices if entry.device.name in used)
    for zone in (zone for zone in has_used_kind if zone not in best.selection.zones):
        with_it = [one for one in explored if zone in one.selection.zones]
        lines.append(_left_out_text(zone, with_it, best, aims))
    if best.cost and (cheaper := [one for one in frontier(explored) if one.cost and one.cost < best.cost]):
        cheapest = min(cheaper, key=lambda one: one.cost or 0.0)
        if _distance(cheapest, best) >= log(1 + LEAST_DIFFERENCE) and not _has_gain(cheapest, best):
            error = f"{forecast_error(cheapest, best):.1%}"
            lines.append(
                f"cheaper choices save less than this forecast may be off ({error}): {cheapest.selection} would take "
                f"{format_days(cheapest.wall_s)} for {cost_text(cheapest)}"
            )
    return lines


def _left_out_text(what: str, with_it: Sequence[PoolChoice], best: PoolChoice, aims: Aims) -> str:
    if not with_it:
        return f"{what} is not used: no selection with it holds the job, or comes near the recommended one"
    meets = [one for one in with_it if not missing(one, aims)]
    other = min(meets or with_it, key=lambda one: objective_value(one, aims.objective))
    short = "" if meets else ", which misses the bounds"
    costs = "" if other.cost is None else f" for {cost_text(other)}"
    same = max(SAME, forecast_error(other, best))
    if objective_value(other, aims.objective) <= (1 + same) * objective_value(best, aims.objective) and meets:
        return f"{what} would do as well: {choice_text(other)}"
    time = format_days(other.wall_s)
    return f"{what} is not used: the best choice with it, {other.selection}, would take {time}{costs}{short}"
