"""The bytes that a step sends between zones, which clouds charge by the GB."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from plait.layout import AXES
from plait.planner.problem.software_profile import keeps_weights_gathered, splits_weights
from plait.planner.problem.workload import Workload
from plait.planner.search.found import Search

ZonePair = tuple[str, str]
"""The sending and the receiving zone."""


def bytes_between_zones(
    found: Search, index: int, zone_of_nodes: Sequence[str], parameters: int
) -> dict[ZonePair, float]:
    """Bytes of one step of a layout that leave each zone for each other one.

    `zone_of_nodes` lists the zones of the search's nodes, in their given order. Gradients and sharded parameters travel
    around rings of ranks, so a zone sends what crosses its end of the ring; stages send each other the activations of
    all tokens, and their gradients. Replicas are assumed to have equal shares.
    """
    if len(set(zone_of_nodes)) == 1:
        return {}
    zones = _zone_of_ranks(found, zone_of_nodes)
    sent = defaultdict[ZonePair, float](float)
    for pair, amount in (
        *_around_rings(found, index, zones, parameters),
        *_between_stages(found, index, zones),
    ):
        if pair[0] != pair[1]:
            sent[pair] += amount
    return dict(sent)


def _zone_of_ranks(found: Search, zone_of_nodes: Sequence[str]) -> list[str]:
    """The zone of each rank, nodes in the order that the search chose."""
    order = found.host_order.hosts if found.host_order else range(len(zone_of_nodes))
    sizes = [island.per_node for island in found.cluster.islands for _ in range(island.nodes)]
    return [zone_of_nodes[node] for node, size in zip(order, sizes, strict=True) for _ in range(size)]


def _mesh(found: Search, index: int, zones: Sequence[str]) -> NDArray[np.str_]:
    """Zones by mesh coordinates."""
    row = found.candidates.row(index)
    return np.array(zones).reshape([int(row[axis]) for axis in AXES])


def _around_rings(found: Search, index: int, zones: Sequence[str], parameters: int) -> Iterator[tuple[ZonePair, float]]:
    mesh, workload, profile = _mesh(found, index, zones), found.workload, found.profile
    pipeline, replicate, shard, context, tensor = mesh.shape
    numbers = parameters / (pipeline * tensor)
    gathered, summed = workload.element_bytes * numbers, profile.gradient_message_bytes * numbers
    within = gathered + summed
    one = found.candidates.select(np.array([index]))
    if splits_weights(one, profile)[0]:
        tables = (1 if workload.tied else 2) * workload.element_bytes * workload.embedding_parameters / tensor
        once = tables if profile.lasting_weights == "once a step" else 0.0
        once = gathered if keeps_weights_gathered(one, profile)[0] else once
        micros = int(found.n_microbatches[index])
        within = micros * 2 * (gathered - once) + (1 if one.sums_once[0] else micros) * summed + once
    for p, t in np.ndindex(pipeline, tensor):
        if shard > 1:
            for r in range(replicate):
                yield from _ring(mesh[p, r, :, :, t].ravel(), within)
            rings = [mesh[p, :, s, c, t] for s, c in np.ndindex(shard, context)]
        else:
            rings = [mesh[p, :, 0, :, t].ravel()]
        for ring in rings:  # an all-reduce goes around twice
            yield from _ring(ring, 2 * summed / len(rings))


def _ring(zones: NDArray[np.str_], size: float) -> Iterator[tuple[ZonePair, float]]:
    """Traffic of one turn around a ring, of `size` bytes that its ranks hold together or each."""
    if (n := len(zones)) > 1:
        for here, there in pairwise([*zones.tolist(), zones[0]]):
            yield (str(here), str(there)), size * (n - 1) / n


def _between_stages(found: Search, index: int, zones: Sequence[str]) -> Iterator[tuple[ZonePair, float]]:
    mesh = _mesh(found, index, zones)
    stages = mesh.shape[0]
    if stages == 1:
        return
    virtual = int(found.candidates.row(index)["virtual"])
    columns = mesh.reshape(stages, -1)
    each = (
        _stream_bytes(found.workload, found.profile.stage_message_bytes(found.workload.element_bytes))
        / columns.shape[1]
    )
    hops = [(stage, stage + 1, virtual) for stage in range(stages - 1)] + [(stages - 1, 0, virtual - 1)]
    for here, there, times in hops:
        for one, other in zip(columns[here].tolist(), columns[there].tolist(), strict=True):
            yield (one, other), times * each
            yield (other, one), times * each  # the gradients


def _stream_bytes(workload: Workload, number_bytes: float) -> float:
    """Bytes of all of a batch's tokens between two layers."""
    return workload.batch_tokens * workload.width * number_bytes


def egress_cost(sent: Mapping[ZonePair, float], prices: Mapping[frozenset[str], float]) -> float:
    """The price of the traffic of one step, in a pool's currency."""
    return sum(amount / 1e9 * prices[frozenset(pair)] for pair, amount in sent.items())
