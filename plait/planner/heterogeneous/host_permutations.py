"""Permutations of the hosts. Ranks are numbered host by host, so the host order decides which device has which
coordinate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from plait.machines.cluster import Cluster, Island
from plait.planner.problem.candidates import Candidates
from plait.planner.step_time.host_links import host_links_of

MOST_BLOCKS_PERMUTED = 4
"""Hosts, or rows of equal hosts, up to which all permutations are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOrder:
    """A permutation of the hosts."""

    hosts: tuple[int, ...]
    """For each position in the new order the number that the host had in the given order."""
    step_s_in_given_order: float | None
    """Seconds of a step with the hosts in the given order; None where no layout fits them so."""


def crosses_hosts_needlessly(cluster: Cluster, candidates: Candidates) -> NDArray[np.bool_]:
    """Mask of candidates whose tensor- or context-parallel group spans two hosts although it would fit in one.

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
    """A cluster of this many devices of an island's first node, with what a probe measured on that host."""
    island = replace(cluster.islands[place], per_node=devices, nodes=1)
    one, measured = replace(cluster, islands=(island,)), cluster.measured
    hosts = _hosts(cluster, cluster.islands)
    if measured is None or hosts is None:
        return one
    host = measured.devices[hosts[place].start]
    if host.workers >= devices:
        host = replace(host, workers=devices, rates=host.rates[:devices])
    return replace(one, measured=replace(measured, devices=(host,), workers=devices))


def cluster_of_nodes(cluster: Cluster, nodes: Sequence[int]) -> Cluster:
    """The cluster of some nodes, given by their numbers, with what a probe measured on those hosts."""
    blocks = _single_nodes(cluster)
    few, measured = replace(cluster, islands=_joined([blocks[node] for node in nodes])), cluster.measured
    hosts = _hosts(cluster, blocks)
    if measured is None or hosts is None:
        return few
    devices = tuple(measured.devices[host] for node in nodes for host in hosts[node])
    return replace(few, measured=replace(measured, devices=devices, workers=few.n_devices))


def other_orders(cluster: Cluster, *, first_stays: bool) -> list[tuple[tuple[int, ...], Cluster]]:
    """The hosts in every other order, or in those that keep the first host first; each with the permutation that leads
    to it.

    Of more than MOST_BLOCKS_PERMUTED blocks only the two orders by speed are tried and, where a probe found links of
    very different rates, the one in which each host is followed by the one with the fastest link to it.
    """
    blocks = _blocks(cluster)
    hosts = _hosts(cluster, blocks)
    if cluster.measured is not None and hosts is None:
        return []
    ends = list(accumulate((block.nodes for block in blocks), initial=0))
    timed = cluster.measured.devices if cluster.measured else ()
    known, found = [(blocks, timed)], list[tuple[tuple[int, ...], Cluster]]()
    chains = [order for order in [_chain(cluster, blocks)] if order and first_stays]
    for order in (*_orders(blocks, first_stays=first_stays), *chains):
        there = [blocks[place] for place in order]
        devices = tuple(timed[host] for place in order for host in hosts[place]) if hosts else ()
        if (there, devices) in known:
            continue
        known.append((there, devices))
        other = replace(cluster, islands=_joined(there))
        if cluster.measured is not None:
            other = replace(other, measured=replace(cluster.measured, devices=devices))
        found.append((tuple(node for place in order for node in range(ends[place], ends[place + 1])), other))
    return found


def has_unequal_links(cluster: Cluster) -> bool:
    """Whether a probe found some links between hosts to be far faster than others."""
    return cluster.measured is not None and host_links_of(cluster.measured) is not None


def _chain(cluster: Cluster, blocks: Sequence[Island]) -> tuple[int, ...]:
    """Hosts ordered so that neighbours have fast links; empty where links are equal, or all orders are tried anyway."""
    found = host_links_of(cluster.measured) if cluster.measured and len(blocks) > MOST_BLOCKS_PERMUTED else None
    order = found.greedy_host_order() if found else ()
    return order if len(order) == len(blocks) else ()


def _orders(blocks: Sequence[Island], *, first_stays: bool) -> Iterator[tuple[int, ...]]:
    first = (0,) if first_stays else ()
    rest = range(len(first), len(blocks))
    if len(blocks) <= MOST_BLOCKS_PERMUTED:
        ways = permutations(rest)
    else:
        upwards = tuple(sorted(rest, key=lambda at: blocks[at].speed * max(blocks[at].device.peak_flops.values())))
        ways = (upwards, upwards[::-1])
    return ((*first, *way) for way in ways)


def _blocks(cluster: Cluster) -> list[Island]:
    """The units to permute: single hosts where they are few or have unequal links, else rows of equal hosts."""
    if cluster.n_nodes > MOST_BLOCKS_PERMUTED and not has_unequal_links(cluster):
        return list(cluster.islands)
    return _single_nodes(cluster)


def _single_nodes(cluster: Cluster) -> list[Island]:
    ones = ((replace(island, nodes=1), island.nodes) for island in cluster.islands)
    return [one for one, count in ones for _ in range(count)]


def _joined(blocks: Sequence[Island]) -> tuple[Island, ...]:
    """The islands, with neighbours of equal nodes merged into one."""
    joined: list[tuple[Island, int]] = []
    for block in blocks:
        first, nodes = joined[-1] if joined else (None, 0)
        if first is not None and (block is first or replace(block, nodes=first.nodes) == first):
            joined[-1] = (first, nodes + block.nodes)
        else:
            joined.append((block, block.nodes))
    return tuple(replace(first, nodes=nodes) for first, nodes in joined)


def _hosts(cluster: Cluster, blocks: Sequence[Island]) -> list[range] | None:
    """The measured hosts of each block; None where blocks and measured hosts do not match."""
    if cluster.measured is None:
        return None
    ends = list(accumulate((device.workers for device in cluster.measured.devices), initial=0))
    wanted = list(accumulate((block.n_devices for block in blocks), initial=0))
    if ends[-1] != wanted[-1] or not set(wanted) <= set(ends):
        return None
    return [range(ends.index(first), ends.index(last)) for first, last in pairwise(wanted)]
