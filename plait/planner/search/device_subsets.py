"""Leaving devices out: the natural subsets of a cluster, each searched by itself, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from plait.errors import PlaitError
from plait.machines.cluster import Cluster
from plait.planner.heterogeneous.device_speeds import device_speeds_of
from plait.planner.heterogeneous.host_permutations import cluster_of_nodes, node_alone
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.workload import Workload
from plait.planner.search.constraints import Constraints
from plait.planner.search.found import Search
from plait.planner.search.host_order import with_best_host_order
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


def simplest_subset(searches: Sequence[Search]) -> int:
    """Index of the search whose chosen layout to take: of those about as fast as the fastest the one with fewest
    devices, then the one with fewest points, then the fastest."""
    tolerance = max(one.tolerance for one in searches)
    enough_s = (1 + tolerance) * min(one.best_step_s for one in searches)

    def key(index: int) -> tuple[bool, int, int, float]:
        one = searches[index]
        return (
            one.chosen_step_s > enough_s,
            one.cluster.n_devices,
            int(one.complexity[one.chosen]),
            one.chosen_step_s,
        )

    return min(range(len(searches)), key=key)


def search_subsets(
    workload: Workload, cluster: Cluster, profile: SoftwareProfile, constraints: Constraints, *, within_s: float
) -> Iterator[tuple[DeviceSubset, Search]]:
    """The search of every natural subset that may take no more than `within_s` seconds a step and holds the job."""
    for subset in natural_subsets(workload, cluster, profile):
        if cluster.measured is None and _least_step_s(workload, subset.cluster, profile) > within_s:
            continue
        try:
            found = search(workload, subset.cluster, profile=profile, constraints=constraints)
        except PlaitError:  # it is too small for this model, or no layout of this many devices carries the batch
            continue
        yield subset, with_best_host_order(found)


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


def _least_step_s(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> float:
    """Seconds of a step if all devices did nothing but the largest products: no layout takes less."""
    rate = sum(
        island.n_devices * device_rates(island.device, workload.precision, profile, island.speed).linear_flops
        for island in cluster.islands
    )
    return workload.flops_per_token("causal") * workload.batch_tokens / rate
