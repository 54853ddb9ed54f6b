"""Which device takes which coordinate: ranks follow the machines, so it is their order, and the groups within them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from plait.cluster.cluster import Cluster
from plait.plan.candidates import Candidates

MOST_ISLANDS = 4
"""Up to which all orders of islands are tried."""


def torn(cluster: Cluster, candidates: Candidates) -> NDArray[np.bool_]:
    """Where a group that cuts matrices or sequences would straddle two machines although each is large enough for one.

    Such a group would wait for the slow link in every layer.
    """
    per_node = [island.per_node for island in cluster.islands]
    ends = set(accumulate(each for island in cluster.islands for each in [island.per_node] * island.nodes))
    found = np.zeros(len(candidates), dtype=bool)
    for inner in (candidates.tensor, candidates.tensor * candidates.context):
        for size in np.unique(inner):
            if 1 < size <= min(per_node) and any(end % size for end in ends):
                found |= inner == size
    return found


def node_alone(cluster: Cluster, place: int, devices: int) -> Cluster:
    """So many devices of an island's first node without all others, and what a probe timed on its host."""
    island = replace(cluster.islands[place], per_node=devices, nodes=1)
    one, measured, hosts = replace(cluster, islands=(island,)), cluster.measured, _hosts(cluster)
    if measured is None or hosts is None:
        return one
    host = measured.devices[hosts[place].start]
    if host.workers >= devices:
        host = replace(host, workers=devices, rates=host.rates[:devices])
    return replace(one, measured=replace(measured, devices=(host,), workers=devices))


def other_orders(cluster: Cluster, *, first_stays: bool) -> list[tuple[tuple[int, ...], Cluster]]:
    """The same machines in every other order, where there are four kinds of them at most; or in those that begin with
    the same kind.

    Each with the number that the machine at each place had.
    """
    kinds = range(len(cluster.islands))
    if not 1 < len(kinds) <= MOST_ISLANDS:
        return []
    measured, hosts = cluster.measured, _hosts(cluster)
    found: list[tuple[tuple[int, ...], Cluster]] = []
    if measured is not None and hosts is None:
        return []
    ends = list(accumulate((island.nodes for island in cluster.islands), initial=0))
    for order in list(permutations(kinds))[1:]:
        if first_stays and order[0]:
            break
        islands = tuple(cluster.islands[place] for place in order)
        other = replace(cluster, islands=islands)
        if measured is not None and hosts is not None:
            devices = tuple(measured.devices[host] for place in order for host in hosts[place])
            other = replace(other, measured=replace(measured, devices=devices))
        if islands != cluster.islands and all(islands != known.islands for _, known in found):
            found.append((tuple(node for kind in order for node in range(ends[kind], ends[kind + 1])), other))
    return found


def _hosts(cluster: Cluster) -> list[range] | None:
    """The measured hosts of each island; None where they do not go with the islands."""
    if cluster.measured is None:
        return None
    ends = list(accumulate((device.workers for device in cluster.measured.devices), initial=0))
    islands = list(accumulate((island.devices for island in cluster.islands), initial=0))
    if ends[-1] != islands[-1] or not set(islands) <= set(ends):
        return None
    return [range(ends.index(first), ends.index(last)) for first, last in pairwise(islands)]
