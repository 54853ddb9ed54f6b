"""Sentences on what would change the choice, how reliable the forecast is, and whether every machine is useful."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.errors import PlaitError
from plait.machines.catalog import Link
from plait.machines.cluster import Cluster, Island, device_bytes_per_s
from plait.planner.explain.compared_layouts import tolerance_text
from plait.planner.explain.tipping_points import LARGEST_FACTOR_TRIED, TippingPoint, tipping_points
from plait.planner.heterogeneous.host_permutations import node_alone
from plait.planner.search.found import Search
from plait.planner.search.layout_kinds import kind_text
from plait.planner.search.model_error import RunFamily, published_errors, run_family
from plait.planner.search.search import search
from plait.planner.step_time.device_rates import USUAL_ACHIEVABLE_SHARE
from plait.planner.step_time.device_time import was_measured
from plait.units import as_long_text, counted, format_bytes, format_duration, plain_number

FEW_NODES = 8
"""Up to this many nodes it is worth a word whether one of them alone would be as fast."""


def layout_changes(found: Search) -> list[str]:
    """At what bandwidth, memory or batch another kind of layout would be chosen."""
    all_flips = tipping_points(found)
    lines = [_flip_sentence(found, flip) for flip in all_flips]
    for what, words in (("between", "between the nodes"), ("inside", "inside a node")):
        there = found.cluster.n_nodes > 1 if what == "between" else _several_inside(found.cluster)
        if there and not any(flip.what == what for flip in all_flips):
            lines.append(
                f"no link {words}, {LARGEST_FACTOR_TRIED:.0f} times slower or faster, would change the kind of layout"
            )
    return lines


def certainty_lines(found: Search) -> list[str]:
    """How reliable the forecast is, and what it assumes without measurement."""
    step_s = float(found.step_s[found.chosen])
    low, high = format_duration(step_s * (1 - found.tolerance)), format_duration(step_s * (1 + found.tolerance))
    if was_measured(found.workload, found.cluster):
        assert found.cluster.measured is not None
        return [
            f"arithmetic and messages were measured on these machines ({found.cluster.measured.date}): layouts within "
            f"{tolerance_text(found)} of each other count as equally fast; expect {low} to {high}"
        ]
    lines = [
        f"nothing was measured on these machines: {_record(found)}, so expect {low} to {high}; layouts within "
        f"{tolerance_text(found)} of each other count as equally fast"
    ]
    guessed = [i.device.name for i in found.cluster.islands if i.device.achievable is None]
    if guessed:
        lines.append(
            f"nobody has published how much of its arithmetic peak {' or '.join(dict.fromkeys(guessed))} reaches in "
            f"large products; {USUAL_ACHIEVABLE_SHARE:.0%} is assumed"
        )
    return lines


def _record(found: Search) -> str:
    """How far off forecasts like this one have been."""
    family = run_family(found.workload, found.cluster)
    known = published_errors(family)
    errors = f"half were forecast within {known.median:.0%}, nine of ten within {known.p90:.0%}"
    if not known.rows:
        return f"{RUN_FAMILY_TEXTS[family]}; elsewhere, where the model did worst, {errors}"
    return f"of {known.rows:,} published runs of {RUN_FAMILY_TEXTS[family]} {errors}"


RUN_FAMILY_TEXTS: Mapping[RunFamily, str] = {
    "dense-gpu": "dense models on GPUs",
    "moe": "models with experts on GPUs",
    "tpu": "models on TPUs",
    "cpu": "no run on processors is published",
}


def idle_machine_lines(found: Search) -> list[str]:
    """What a step would take on one machine of each kind alone, unless that is the layout."""
    cluster = found.left_out.cluster if found.left_out else found.cluster
    if not 1 < cluster.n_nodes <= FEW_NODES:
        return []
    places = [place for place, island in enumerate(cluster.islands) if replace(island, nodes=1) not in _used(found)]
    return [_alone(found, cluster, place) for place in places]


def _used(found: Search) -> tuple[Island, ...]:
    return found.cluster.islands if found.cluster.n_nodes == 1 else ()


def _alone(found: Search, cluster: Cluster, place: int) -> str:
    island = cluster.islands[place]
    words = f"{island.per_node} × {island.device.name}" if island.per_node > 1 else f"one {island.device.name}"
    one = replace(node_alone(cluster, place, island.per_node), name=words)
    try:
        alone = search(found.workload, one, profile=found.profile, tolerance=found.tolerance)
    except PlaitError:
        return f"{words} alone does not hold this model"
    alone_s, step_s = alone.chosen_step_s, found.chosen_step_s
    if alone_s < step_s:
        return f"{words} alone would take {format_duration(alone_s)} a step, less than this: start the run there, alone"
    return f"{words} alone would take {format_duration(alone_s)} a step, {as_long_text(alone_s / step_s)}"


def _flip_sentence(found: Search, flip: TippingPoint) -> str:
    condition, have = _condition(found, flip)
    return f"{condition} (here: {have}) another layout would be chosen: {kind_text(flip.winner)}"


def _condition(found: Search, flip: TippingPoint) -> tuple[str, str]:
    """(condition under which another layout wins, present value), as text."""
    cluster, island, side = found.cluster, found.cluster.islands[0], "below" if flip.factor < 1 else "above"
    match flip.what:
        case "between":
            there, have = (link_rate_text(cluster.between, factor) for factor in (flip.factor, 1.0))
            return f"{side} about {there} between the nodes", have
        case "inside":
            there, have = (inside_rate_text(island, factor) for factor in (flip.factor, 1.0))
            return f"{side} about {there} a device inside a node", have
        case "memory":
            memory = min(each.device.memory_bytes for each in cluster.islands)
            than = "less" if flip.factor < 1 else "more"
            return f"with about {format_bytes(memory * flip.factor)} a device or {than}", format_bytes(memory)
        case "batch":
            batch = found.workload.batch_sequences
            return f"with {counted(round(batch * flip.factor), 'sequence', ',')} a step", f"{batch:,}"


def link_rate_text(network: Link, factor: float = 1.0) -> str:
    """The bandwidth of a network, or this many times as much, and whose it is: "8.07 Gbit/s a machine"."""
    wires = 2 * network.axes if network.shape == "torus" else 1
    whose = "a machine" if network.shape == "shared" else "a device"
    return f"{plain_number(network.bytes_per_s * wires * factor * 8 / 1e9)} Gbit/s {whose}"


def inside_rate_text(island: Island, factor: float = 1.0) -> str:
    """The bandwidth of one device of a node to the others, or this many times as much: "540 GB/s"."""
    return f"{plain_number(device_bytes_per_s(island.inside, island.per_node) / 1e9 * factor)} GB/s"


def _several_inside(cluster: Cluster) -> bool:
    return max(island.per_node for island in cluster.islands) > 1
