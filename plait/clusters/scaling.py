"""How many nodes are worthwhile: time, cost and efficiency of one job at 1, 2, 4, … nodes, as the planner forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from plait.clusters.machines import scaled
from plait.commands.preparing.usual_corpus import corpus_facts_or_usual
from plait.errors import PlaitError
from plait.layout import Layout
from plait.machines.cluster import Cluster
from plait.model.shape import parameter_count
from plait.planner.derive.resources import on_paper
from plait.planner.plan import Plan
from plait.planner.resolve.resolve import draft, settle
from plait.planner.resolve.worker_layouts import choose
from plait.recipe.schema import RunConfig
from plait.units import counted, format_count, format_duration
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

MOST_NODES = 1024
PAYS = 0.75
"""Twice the nodes pay while the added ones reach this share of their own speed: a run then takes at most 2/3 of the
time."""
_SHOWN_AFTER = 2
"""Number of doublings shown after the last one that pays off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesForecast:
    """The planner's forecast of one job on a number of nodes."""

    nodes: int
    devices: int
    """GPUs or TPU chips, or machines that compute on their processors."""
    peak_flops: float
    """Peak FLOP/s of all devices together."""
    layout: Layout
    """Decides where ranks are placed."""
    step_s: float
    run_s: float
    price: float | None
    """US dollars for the whole run; None if a device has no public price."""

    @property
    def device_hours(self) -> float:
        """Hours of all devices together."""
        return self.run_s * self.devices / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The forecasts for one job, fewest nodes first."""

    plan: Plan
    """The job's plan for the fewest nodes that can hold it."""
    rows: tuple[NodesForecast, ...]
    existing: int
    """Number of nodes that exist; rows with more are hypothetical."""

    @property
    def pays(self) -> int:
        """Number of existing nodes that pay off."""
        there = [row for row in self.rows if row.nodes <= self.existing] or self.rows[:1]
        pairs = takewhile(lambda pair: _pays(*pair), pairwise(there))
        return max((after.nodes for _, after in pairs), default=there[0].nodes)

    @property
    def best(self) -> NodesForecast:
        """The row with the nodes that pay off."""
        return self.row(self.pays)

    def row(self, nodes: int) -> NodesForecast:
        """The row of a number of nodes."""
        return next(row for row in self.rows if row.nodes == nodes)

    def efficiency(self, row: NodesForecast) -> float:
        """Work per hour and peak FLOP/s, relative to the fewest nodes."""
        first = self.rows[0]
        return first.step_s * first.peak_flops / (row.step_s * row.peak_flops)


def forecast_scaling(
    config: RunConfig, cluster: Cluster, *, wanted: int | None, working: WorkingFolder = CURRENT_FOLDER
) -> Scaling:
    """Forecast one job on 1, 2, 4, … nodes of the cluster; of equal nodes also on more than exist. Raises PlaitError
    where no number holds it.

    The job is fixed on the fewest nodes that hold it, so that all rows are of the same model, batch and steps.
    """
    corpus, _ = corpus_facts_or_usual(config, working)
    first: Plan | None = None
    rows: list[NodesForecast] = []
    refusal: PlaitError | None = None
    for nodes in _counts(cluster.n_nodes, wanted):
        try:
            some = scaled(cluster, nodes)
            paper = on_paper(some)
            drafted = draft(config, corpus, paper, recipe_hash="", begun=first)
        except PlaitError as error:
            refusal = refusal or error
            continue
        chosen = choose(drafted.layouts)
        if chosen.forecast is None or paper.peak_flops is None:
            raise PlaitError(f"the devices of {cluster.name} are not in plait's catalogue; name --nodes yourself")
        first = first or settle(config, drafted, [chosen])
        run_s, price = chosen.forecast.step_s * first.job.steps, some.price_per_hour
        row = NodesForecast(
            nodes=nodes,
            devices=some.hour_devices,
            peak_flops=paper.peak_flops,
            layout=chosen.layout,
            step_s=chosen.forecast.step_s,
            run_s=run_s,
            price=None if price is None else price * run_s / 3600,
        )
        rows.append(row)
        if wanted is None and _has_levelled_off(rows):
            break
    if first is None:
        raise refusal or PlaitError("no number of nodes was tried; name --nodes")
    return Scaling(plan=first, rows=tuple(rows), existing=cluster.n_nodes)


def _counts(existing: int, wanted: int | None) -> list[int]:
    """Powers of two up to MOST_NODES, and the number that was asked for or exists; the last ones are on paper."""
    powers = [1 << exponent for exponent in range(MOST_NODES.bit_length())]
    most = min(MOST_NODES, 2 * wanted) if wanted else MOST_NODES
    return sorted({count for count in powers if count <= most} | {wanted or existing})


def _pays(before: NodesForecast, after: NodesForecast) -> bool:
    """Whether the added devices bring enough of their own speed."""
    added = after.peak_flops / before.peak_flops - 1
    gain = (before.step_s / after.step_s - 1) / added if added > 0 else 0.0
    return gain >= 2 * PAYS - 1


def _has_levelled_off(rows: Sequence[NodesForecast]) -> bool:
    pairs = list(pairwise(rows))[-_SHOWN_AFTER:]
    return len(pairs) == _SHOWN_AFTER and not any(_pays(*pair) for pair in pairs)


def scaling_table(scaling: Scaling) -> list[str]:
    """The forecasts as a table, a line each."""
    heads = ("nodes", "devices", "step", "whole run", "device-hours", "money", "efficiency")
    rows = [heads, *(_cells(scaling, row) for row in scaling.rows)]
    wide = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, wide, strict=True)) for row in rows]


def _cells(scaling: Scaling, row: NodesForecast) -> tuple[str, ...]:
    money = "unknown" if row.price is None else f"${format_count(row.price)}" if row.price >= 0.01 else "under $0.01"
    on_paper_only = "*" if row.nodes > scaling.existing else ""
    return (
        f"{row.nodes:,}{on_paper_only}",
        f"{row.devices:,}",
        format_duration(row.step_s),
        f"{days:.1f} days" if (days := row.run_s / 86400) >= 2 else format_duration(row.run_s),
        format_count(row.device_hours),
        money,
        f"{scaling.efficiency(row):.0%}",
    )


def scaling_text(scaling: Scaling, chosen: int, hardware: str) -> str:
    """The table with its heading, and the reason for the chosen number of nodes."""
    plan = scaling.plan
    about = f"{format_count(parameter_count(plan.job.shape))} parameters, {counted(plan.job.steps, 'step', ',')} of "
    lines = [f"forecast {about}{plan.batch_tokens:,} tokens; {hardware}"]
    lines += [f"         {line}" for line in scaling_table(scaling)]
    if any(row.nodes > scaling.existing for row in scaling.rows):
        there = counted(scaling.existing, "node")
        lines.append(f"         * on paper: there {'is' if scaling.existing == 1 else 'are'} {there}")
    return "\n".join([*lines, *(f"nodes    {sentence}" for sentence in pays_sentences(scaling, chosen))])


def pays_sentences(scaling: Scaling, chosen: int) -> list[str]:
    """Where more nodes stop paying off, and the effect of the chosen number."""
    best = scaling.best
    sentences = [f"{counted(best.nodes, 'node')}: {_why_this_many(scaling)}"]
    if chosen != best.nodes:
        row = scaling.row(chosen)
        than = best.run_s / row.run_s
        speed = f"{than:.2g} times as fast as {best.nodes}" if than >= 1 else f"{1 / than:.2g} times as slow"
        sentences.append(
            f"{counted(chosen, 'node')} as asked: {speed}, at {row.device_hours / best.device_hours:.2g} "
            "times the device-hours"
        )
    return sentences


def _why_this_many(scaling: Scaling) -> str:
    best = scaling.best
    at = scaling.rows.index(best)
    if at + 1 == len(scaling.rows):
        all_there = best.nodes >= scaling.existing
        return "all that there are, and all of them pay" if all_there else "no other number carries out this recipe"
    after = scaling.rows[at + 1]
    gain = 1 - after.run_s / best.run_s
    saved = f"take {gain:.0%} less time" if gain > 0 else "take no less time"
    if _pays(best, after):  # only that there are no more
        return f"all that there are; {after.nodes} would {saved}"
    more = after.device_hours / best.device_hours
    return f"here more stops paying: {after.nodes} would {saved} for {more:.2g} times the device-hours"
