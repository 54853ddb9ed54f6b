"""A cluster of which some nodes lack bf16: whether a run goes faster, or as fast, on those that have it.

One precision holds for a whole run, so a V100 among A100s would make all of them compute in float32. The nodes with
bf16 are therefore planned by themselves as well, in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.machines.cluster import Cluster
from plait.planner.derive.resources import Resources, on_paper
from plait.planner.heterogeneous.host_permutations import cluster_of_nodes
from plait.planner.resolve.request import Request
from plait.planner.resolve.worker_layouts import WorkerLayout, choose
from plait.planner.search.cost_breakdown import cluster_peak_flops
from plait.planner.search.found import LeftOut
from plait.recipe.schema import RunConfig


def may_leave_out_for_bf16(config: RunConfig, request: Request) -> bool:
    """Whether plait chose float32 for this request, and also which of the devices take part."""
    is_open = config.train.precision == "auto" and not request.constraints.degrees
    return (
        is_open and request.arithmetic.precision == "float32" and {one.devices for one in request.options} == {"some"}
    )


def resources_with_bf16(resources: Resources, cluster: Cluster) -> tuple[Resources, tuple[int, ...]] | None:
    """The nodes of this cluster, which these machines are, that have bf16 arithmetic: as resources of their own, and
    their numbers. None where that is all of them or none, or where the host that leads a run is not among them."""
    have = ["bf16" in island.device.peak_flops for island in cluster.islands for _ in range(island.nodes)]
    machines = resources.machines if resources.is_here else ()
    if machines and len(machines) != len(have):  # GPUs of several kinds in one machine
        return None
    for node, machine in enumerate(machines):
        have[node] = have[node] and "bf16" not in machine.without
    nodes = tuple(node for node, has in enumerate(have) if has)
    if all(have) or not nodes or (machines and nodes[0] != 0):
        return None
    part = cluster_of_nodes(cluster, nodes)
    if not machines:
        return on_paper(part, resources.load_calibration, resources.load_expert_load), nodes
    others, peak = tuple(machines[node] for node in nodes[1:]), cluster_peak_flops(part, "bf16")
    return replace(resources, others=others, peak_flops=peak, cluster=part, probe=None), nodes


def seen_from_whole(cluster: Cluster, nodes: tuple[int, ...], layouts: Sequence[WorkerLayout]) -> LeftOut | None:
    """What a layout on these nodes leaves out, with the search over all that `layouts` are from; None where the planner
    knows no device."""
    whole = choose(layouts).search
    if whole is None:
        return None
    return LeftOut(cluster=cluster, nodes=nodes, whole=whole.left_out.whole if whole.left_out else whole)


def is_preferred(part: Sequence[WorkerLayout], whole: Sequence[WorkerLayout]) -> bool:
    """Whether fewer devices are about as fast: the rule of search/host_choice.py."""
    few, all_of_them = choose(part).forecast, choose(whole).forecast
    if few is None or all_of_them is None:
        return False
    return few.step_s <= (1 + max(few.error, all_of_them.error)) * all_of_them.step_s
