"""What a layout sends from one island of machines to another, and what stays inside each: in a sentence."""

from __future__ import annotations

from plait.layout import AXES
from plait.planner.search.found import Search
from plait.planner.step_time.network_model import achieved_bytes_per_s
from plait.units import plain_number

AXIS_TRAFFIC = {
    "pipeline": "results of pipeline stages",
    "replicate": "sums of the copies' gradients",
    "shard": "the shards' gradients and parameters",
    "context": "keys of cut sequences",
    "tensor": "sums of cut matrices",
}


def island_traffic_lines(found: Search) -> list[str]:
    """What crosses the link between islands, where islands of several nodes have networks of their own."""
    cluster, network = found.cluster, found.cost_inputs.network
    if len(cluster.islands) < 2 or all(island.nodes == 1 for island in cluster.islands):
        return []
    degrees = found.candidates.degrees(found.chosen).degrees
    crossing, staying, stride = [], [], 1
    for axis in reversed(AXES):
        if degrees[axis] > 1:
            crosses = bool(network.spans_islands(degrees[axis], stride))
            (crossing if crosses else staying).append(AXIS_TRAFFIC[axis])
        stride *= degrees[axis]
    per_node = max(island.per_node for island in cluster.islands)
    rate = achieved_bytes_per_s(cluster.between, per_node, cluster.between.reached) / 1e9
    line = f"{' and '.join(crossing)} cross from island to island, at {plain_number(rate)} GB/s a device"
    return [line + (f"; {' and '.join(staying)} stay on each island's own network" if staying else "")]
