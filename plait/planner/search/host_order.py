"""Searches for the best order of unequal hosts, which decides which host holds which layers of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from plait.errors import PlaitError
from plait.machines.cluster import Cluster
from plait.planner.heterogeneous.batch_shares import LEAST_GAIN_OF_UNEQUAL_SHARES
from plait.planner.heterogeneous.host_permutations import HostOrder, has_unequal_links, other_orders
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.workload import Workload
from plait.planner.search.constraints import Constraints
from plait.planner.search.found import Search
from plait.planner.search.search import search

HostNumbers = tuple[int, ...]


def with_best_host_order(found: Search) -> Search:
    """The search with the hosts in the order that makes a step fastest; in the given order where others gain less than
    LEAST_GAIN_OF_UNEQUAL_SHARES, or only with a more complicated layout.

    The first host stays first: a run is started there. Shares and stages that a person named are for the hosts in the
    given order.
    """
    if not may_reorder_hosts(found.constraints) or (
        found.assigner.devices.are_equal and not has_unequal_links(found.cluster)
    ):
        return found
    here = _step_s(found)
    best = _best(found, other_orders(found.cluster, first_stays=True), (1 - LEAST_GAIN_OF_UNEQUAL_SHARES) * here)
    if best is None:
        return found
    places, other = best
    gains = float(other.step_s.min()) <= (1 - LEAST_GAIN_OF_UNEQUAL_SHARES) * float(found.step_s.min())
    simple = int(other.complexity[other.chosen]) <= int(found.complexity[found.chosen])
    return replace(other, host_order=HostOrder(hosts=places, step_s_in_given_order=here)) if gains or simple else found


def search_host_orders_that_fit(
    workload: Workload, cluster: Cluster, profile: SoftwareProfile, constraints: Constraints
) -> Search | None:
    """The result with the fastest host order that fits, for a job that fits no layout in the given order; None where
    all hosts have the same memory, since layers are assigned by memory as well."""
    if not may_reorder_hosts(constraints) or len({island.device.memory_bytes for island in cluster.islands}) == 1:
        return None
    found: list[Search] = []
    for places, other in other_orders(cluster, first_stays=True):
        with suppress(PlaitError):
            one = search(workload, other, profile=profile, constraints=constraints)
            found.append(replace(one, host_order=HostOrder(hosts=places, step_s_in_given_order=None)))
    return min(found, key=_rank) if found else None


def with_better_first_host(found: Search) -> Search | None:
    """The search with another host first, where that is faster by more than the forecast can tell."""
    orders = [(places, other) for places, other in other_orders(found.cluster, first_stays=False) if places[0]]
    best = _best(found, orders, _step_s(found) / (1 + found.tolerance))
    return best[1] if best else None


def may_reorder_hosts(constraints: Constraints) -> bool:
    """Whether nobody named shares or stages, which are for the hosts in the given order."""
    return not (constraints.shares or constraints.stage_layers)


def _best(
    found: Search, orders: Sequence[tuple[HostNumbers, Cluster]], limit_s: float
) -> tuple[HostNumbers, Search] | None:
    """The best order and its search; None where a step takes longer than the limit, unless the given order needs memory
    that a device may not have, or where the new order needs such memory.

    Orders are compared by the degrees that are best in the given order, chosen and fastest: to price all layouts in all
    orders would take minutes on large clusters.
    """
    tries = (
        [found.constraints]
        if found.constraints.degrees
        else [_degrees(found, at) for at in {found.chosen, found.fastest}]
    )
    tried = [(_on(found, other, constraints), places, other) for places, other in orders for constraints in tries]
    fits = [(one, places, other) for one, places, other in tried if one]
    if not fits:
        return None
    best, places, other = min(fits, key=lambda one: _rank(one[0]))
    whole = best if found.constraints.degrees else _on(found, other, found.constraints)
    if whole is None or (_holds(found) and not _holds(whole)):
        return None
    saved = _holds(whole) and not _holds(found)
    return (places, whole) if saved or _step_s(whole) <= limit_s else None


def _holds(found: Search) -> bool:
    """Whether every device has room for the chosen layout, with the forecast's own error to spare."""
    return found.fits_sparingly(found.chosen)


def _rank(found: Search) -> tuple[bool, float]:
    """Key for comparing orders: those that surely fit first, then the fastest."""
    return not _holds(found), _step_s(found)


def _degrees(found: Search, index: int) -> Constraints:
    return replace(found.constraints, degrees=found.candidates.degrees(index))


def _on(found: Search, cluster: Cluster, constraints: Constraints) -> Search | None:
    """The same search on other hosts; None where nothing fits."""
    try:
        return search(
            found.workload, cluster, profile=found.profile, constraints=constraints, tolerance=found.tolerance
        )
    except PlaitError:
        return None


def _step_s(found: Search) -> float:
    return float(found.step_s[found.chosen])
