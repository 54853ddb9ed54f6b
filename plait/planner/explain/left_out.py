"""What a plan says of devices that its layout does not use: which they are, why, and what would bring them in."""

from __future__ import annotations

from collections import Counter

from plait.errors import PlaitError
from plait.machines.cluster import Cluster
from plait.planner.explain.confidence import link_rate_text
from plait.planner.explain.tipping_points import LARGEST_FACTOR_TRIED, with_faster_network
from plait.planner.search.found import LeftOut, Search
from plait.planner.search.layout_kinds import layout_text
from plait.planner.search.search import search
from plait.units import as_long_text, format_duration

HOSTS_NAMED = 6
"""Hosts up to which each one that is left out is named."""


def devices_text(cluster: Cluster) -> str:
    """The devices of a cluster, by kind: "1 × RTX 4090 + 2 × RTX 3080"."""
    return " + ".join(f"{count} × {name}" for name, count in _counts(cluster).items())


def left_out_text(found: Search) -> str:
    """The devices that the layout leaves out, by host where a probe knows the hosts; empty where it uses all."""
    if (left := found.left_out) is None:
        return ""
    if hosts := left_out_hosts(left):
        return ", ".join(hosts) if len(hosts) <= HOSTS_NAMED else f"{len(hosts)} hosts"
    rest = _counts(left.cluster)
    rest.subtract(_counts(found.cluster))
    return " + ".join(f"{count} × {name}" for name, count in rest.items() if count)


def left_out_hosts(left: LeftOut) -> list[str]:
    """The names of the hosts that are left out; none where no probe knows them."""
    measured = left.cluster.measured
    if measured is None or len(measured.devices) != left.cluster.n_nodes:
        return []
    return [device.host for node, device in enumerate(measured.devices) if node not in left.nodes]


def left_out_lines(found: Search) -> list[str]:
    """Why devices are left out, and at what network they would be used; nothing where all are used."""
    if (left := found.left_out) is None:
        return []
    text = left_out_text(found)
    layout, all_s = layout_text(left.whole.candidates.row(left.whole.chosen)), left.whole.chosen_step_s
    return [f"left out: {text}; {_comparison(found, all_s, layout)}", *_joining_lines(found, left.whole)]


def _comparison(found: Search, all_s: float, layout: str) -> str:
    """How long a step over all devices would take, by the layout that is best there."""
    here = found.chosen_step_s
    if all_s >= here:
        return f"a step over all devices would take {format_duration(all_s)}, {as_long_text(all_s / here)}: {layout}"
    tolerance = max(found.tolerance, found.left_out.whole.tolerance if found.left_out else 0.0)
    told = "less than" if here <= (1 + tolerance) * all_s else f"hardly more than the {tolerance:.1%} that"
    more = f"the chosen layout takes {here / all_s - 1:.1%} longer, which is {told} this forecast can tell"
    return f"a step over all devices would take {format_duration(all_s)} ({layout}); {more}"


def _joining_lines(found: Search, whole: Search) -> list[str]:
    """The speed of the network between the machines from which on all of them would be used."""
    if whole.cluster.n_nodes == found.cluster.n_nodes:
        return []
    enough_s, factor = found.best_step_s / (1 + max(found.tolerance, whole.tolerance)), 2.0
    while factor <= LARGEST_FACTOR_TRIED:
        faster = with_faster_network(whole.cluster, factor)
        try:
            one = search(whole.workload, faster, profile=whole.profile, constraints=whole.constraints)
        except PlaitError:
            return []
        if one.best_step_s < enough_s:
            rate = link_rate_text(faster.between)
            return [f"with about {rate} between the machines it would be worth using all of them"]
        factor *= 2
    return ["no faster network between the machines would make all of them worth using"]


def _counts(cluster: Cluster) -> Counter[str]:
    counts: Counter[str] = Counter()
    for island in cluster.islands:
        counts[island.device.name] += island.n_devices
    return counts
