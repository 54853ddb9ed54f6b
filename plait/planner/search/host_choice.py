"""Which hosts take part, and in which order: the natural subsets of a cluster and the permutations of unequal hosts,
each searched by itself, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from plait.errors import PlaitError
from plait.machines.cluster import Cluster
from plait.planner.heterogeneous.batch_shares import LEAST_GAIN_OF_UNEQUAL_SHARES
from plait.planner.heterogeneous.device_speeds import device_speeds_of
from plait.planner.heterogeneous.host_permutations import (
    HostOrder,
    cluster_of_nodes,
    has_unequal_links,
    node_alone,
    other_orders,
)
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.workload import Workload
from plait.planner.search.enumeration import Constraints
from plait.planner.search.found import LeftOut, Search
from plait.planner.search.search import search
from plait.planner.step_time.device_rates import device_rates

MOST_NODES_COUNTED = 4
"""Up to this many nodes every number of them is tried, beyond powers of two and whole islands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSubset:
    """Some of a cluster's devices."""

    nodes: tuple[int, ...]
    """Numbers of the nodes that are used, in the cluster's order."""
    cluster: Cluster


def with_devices_left_out(whole: Search, cluster: Cluster) -> Search:
    """The search over the devices to use, where `whole` is that over all of the cluster: of those searches whose layout
    is about as fast as the fastest the one with fewest devices, then the one with fewest points, then the fastest."""
    searches = [whole, *_searched_subsets(whole, cluster)]
    tolerance = max(one.tolerance for one in searches)
    enough_s = (1 + tolerance) * min(one.best_step_s for one in searches)

    def key(one: Search) -> tuple[bool, int, int, float]:
        slow = one.chosen_step_s > enough_s
        return slow, one.cluster.n_devices, int(one.complexity[one.chosen]), one.chosen_step_s

    return min(searches, key=key)


def _searched_subsets(whole: Search, cluster: Cluster) -> Iterator[Search]:
    """Every natural subset that holds the job and may be about as fast as the whole."""
    workload, profile, within_s = whole.workload, whole.profile, (1 + whole.tolerance) * whole.best_step_s
    for subset in natural_subsets(workload, cluster, profile):
        if cluster.measured is None and least_step_s(workload, subset.cluster, profile) > within_s:
            continue
        try:
            found = search(workload, subset.cluster, profile=profile, constraints=whole.constraints)
        except PlaitError:  # it is too small for this model, or no layout of this many devices carries the batch
            continue
        left_out = LeftOut(cluster=cluster, nodes=subset.nodes, whole=whole)
        yield replace(with_best_host_order(found), left_out=left_out)


def natural_subsets(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> list[DeviceSubset]:
    """Subsets worth a search, without the whole: the fastest nodes, the nodes of each kind, one node of each kind, and
    some devices of one node.

    Where a probe measured the hosts, a run is started on the first: it stays, and a host is left out as a whole.
    """
    found = [
        DeviceSubset(nodes=nodes, cluster=cluster_of_nodes(cluster, nodes))
        for nodes in _node_sets(workload, cluster, profile)
    ]
    if cluster.measured is None:
        found += _gpu_subsets_of_nodes(cluster)
    return found


def _node_sets(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> list[tuple[int, ...]]:
    count, rows = cluster.n_nodes, _rows_of_nodes(cluster)
    speeds = _speeds_of_nodes(workload, cluster, profile)
    first_stays = cluster.measured is not None
    fastest_first = sorted(range(count), key=lambda node: (first_stays and node > 0, -speeds[node]))
    sizes = (
        range(1, count) if count <= MOST_NODES_COUNTED else [2**k for k in range(count.bit_length()) if 2**k < count]
    )
    changes = [at for at in range(1, count) if speeds[fastest_first[at]] != speeds[fastest_first[at - 1]]]
    prefixes = [tuple(sorted(fastest_first[:size])) for size in sorted({*sizes, *changes})]
    alone = [tuple(row) for row in rows] + [(row[0],) for row in rows]
    return [
        nodes for nodes in dict.fromkeys([*prefixes, *alone]) if len(nodes) < count and (0 in nodes or not first_stays)
    ]


def _rows_of_nodes(cluster: Cluster) -> list[range]:
    """The numbers of each island's nodes."""
    ends = list(accumulate((island.nodes for island in cluster.islands), initial=0))
    return [range(first, last) for first, last in pairwise(ends)]


def _speeds_of_nodes(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> list[float]:
    """Speed of each node: the sum over its devices."""
    speeds, ends = device_speeds_of(workload, cluster, profile).speeds, [0]
    for island in cluster.islands:
        ends += [ends[-1] + island.per_node * (node + 1) for node in range(island.nodes)]
    return [sum(speeds[first:last]) for first, last in pairwise(ends)]


def _gpu_subsets_of_nodes(cluster: Cluster) -> Iterator[DeviceSubset]:
    """Power-of-two subsets of one node's GPUs; CPU nodes are used whole."""
    for island, (place, row) in zip(cluster.islands, enumerate(_rows_of_nodes(cluster)), strict=True):
        sizes = [2**k for k in range(island.per_node.bit_length()) if 2**k < island.per_node]
        for size in sizes if island.device.kind != "cpu" else ():
            yield DeviceSubset(nodes=(row[0],), cluster=node_alone(cluster, place, size))


def least_step_s(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> float:
    """Seconds of a step if all devices did nothing but the largest products: no layout takes less."""
    rate = sum(
        island.n_devices * device_rates(island.device, workload.precision, profile, island.speed).linear_flops
        for island in cluster.islands
    )
    return workload.flops_per_token("causal") * workload.batch_tokens / rate


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
    """Whether no shares or stages are given, which apply to the hosts in the given order."""
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
    """The search repeated on other hosts; None if nothing fits."""
    try:
        return search(
            found.workload, cluster, profile=found.profile, constraints=constraints, tolerance=found.tolerance
        )
    except PlaitError:
        return None


def _step_s(found: Search) -> float:
    return float(found.step_s[found.chosen])
