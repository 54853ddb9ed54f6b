"""The order of unlike machines: which of them hold a model's first layers and which its last, priced like all else."""

from __future__ import annotations

from dataclasses import replace

from plait.cluster.cluster import Cluster
from plait.errors import PlaitError
from plait.plan.search import Search, Turned, search
from plait.plan.seats import other_orders
from plait.plan.shares import WORTH


def in_best_order(found: Search) -> Search:
    """The same question with the machines in the order that makes a step fastest; as they stand where others gain less
    than WORTH.

    The first one stays the first: it is where a run is started, and the others can take any place. Shares and stages
    that a person named are for the machines as they stand.
    """
    if found.pins.shares or found.pins.stage_layers:
        return found
    here, best = _step_s(found), found
    limit = (1 - WORTH) * here
    for places, other in other_orders(found.cluster, first_stays=True):
        tried = _on(found, other)
        if tried and _step_s(tried) < min(limit, _step_s(best)):
            best = replace(tried, turned=Turned(places=places, before_s=here))
    return best


def better_start(found: Search) -> Search | None:
    """The same with another machine first, where that is faster by more than the forecast can tell."""
    best: Search | None = None
    limit = _step_s(found) / (1 + found.tolerance)
    for places, other in other_orders(found.cluster, first_stays=False):
        tried = _on(found, other) if places[0] else None
        if tried and _step_s(tried) < (_step_s(best) if best else limit):
            best = tried
    return best


def _on(found: Search, cluster: Cluster) -> Search | None:
    """The same question on other machines; None where nothing fits."""
    try:
        return search(found.workload, cluster, stack=found.stack, pins=found.pins, tolerance=found.tolerance)
    except PlaitError:
        return None


def _step_s(found: Search) -> float:
    return float(found.step_s[found.chosen])
