"""What would change a plan: the bandwidth, memory or batch from which on another kind of layout is chosen, and what
would make a model fit that fits nowhere. Found by choosing again on altered clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from plait.errors import PlaitError
from plait.machines.catalog import Link
from plait.machines.cluster import Cluster, device_bytes_per_s
from plait.model.adapter_shape import AdapterTarget
from plait.model.sizes import MODEL_SIZES, named_shape
from plait.planner.derive.published_rules import LEAST_RANK
from plait.planner.problem.candidates import Counts, Reals
from plait.planner.problem.software_profile import PLAIT_PROFILE, SoftwareProfile
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.search.enumeration import Constraints
from plait.planner.search.feasibility import DoesNotFit
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import filled_batches
from plait.planner.search.layout_kinds import CandidateRow, kind_text, kinds_of
from plait.planner.search.search import search, simplest, with_other_links
from plait.planner.step_time.step_time import estimate_step_time
from plait.units import counted, format_bytes, format_count, plain_number

LinkPlace = Literal["between", "inside"]
"""The links between nodes, or those inside each node."""
TippingQuantity = Literal["between", "inside", "memory", "batch"]
LARGEST_FACTOR_TRIED = 256.0
"""How many times slower or faster a link is tried."""
FINE_STEPS = 1.03
MANY_LAYOUTS = 12_000
"""Number of layouts beyond which link thresholds are found with representatives, and fewer memory sizes and batches are
tried."""
SHORTEST_SEQUENCE = 512
LOWEST_RANK_SUGGESTED = 8
MOST_DEVICES = 4096
"""How many times more devices are tried for a model that does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TippingPoint:
    """The change of a quantity from which on another kind of layout wins: `factor` times its present value."""

    what: TippingQuantity
    factor: float
    winner: CandidateRow


def tipping_sentences(found: Search) -> list[str]:
    """At what bandwidth, memory or batch another kind of layout would be chosen."""
    return [_tipping_sentence(found, point) for point in tipping_points(found)]


def layout_changes(found: Search) -> list[str]:
    """Changes with which another kind of layout would be chosen, and links that would change nothing."""
    moving = {point.what for point in tipping_points(found)}
    words: dict[LinkPlace, str] = {"between": "between the nodes", "inside": "inside a node"}
    return tipping_sentences(found) + [
        f"no link {words[link]}, {LARGEST_FACTOR_TRIED:.0f} times slower or faster, would change the kind of layout"
        for link in _links_of(found.cluster)
        if link not in moving
    ]


def _tipping_sentence(found: Search, point: TippingPoint) -> str:
    cluster, side = found.cluster, "below" if point.factor < 1 else "above"
    match point.what:
        case "between":
            have, there = (rate_text(cluster, "between", factor) for factor in (1.0, point.factor))
            condition = f"{side} about {there} between the nodes"
        case "inside":
            have, there = (rate_text(cluster, "inside", factor) for factor in (1.0, point.factor))
            condition = f"{side} about {there} a device inside a node"
        case "memory":
            memory = min(island.device.memory_bytes for island in cluster.islands)
            than = "less" if point.factor < 1 else "more"
            condition, have = (
                f"with about {format_bytes(memory * point.factor)} a device or {than}",
                format_bytes(memory),
            )
        case "batch":
            batch = found.workload.batch_sequences
            condition, have = f"with {counted(round(batch * point.factor), 'sequence', ',')} a step", f"{batch:,}"
    return f"{condition} (here: {have}) another layout would be chosen: {kind_text(point.winner)}"


def rate_text(cluster: Cluster, link: LinkPlace, factor: float = 1.0) -> str:
    """The bandwidth of the links, or this many times as much: "8.07 Gbit/s a machine" between nodes, "540 GB/s" for
    each device of a node."""
    return f"{plain_number(link_rate(cluster, link, factor))} {rate_unit(cluster, link)}"


def link_rate(cluster: Cluster, link: LinkPlace, factor: float = 1.0) -> float:
    """The bandwidth of the links, or this many times as much: a network's line rate in Gbit/s, or the GB/s of a device
    inside its node."""
    if link == "inside":
        island = cluster.islands[0]
        return device_bytes_per_s(island.inside, island.per_node) / 1e9 * factor
    between = cluster.between
    wires = 2 * between.axes if between.shape == "torus" else 1
    return between.bytes_per_s * wires * factor * 8 / 1e9


def rate_unit(cluster: Cluster, link: LinkPlace) -> str:
    """The unit of `link_rate`, and whose the bandwidth of a network is."""
    if link == "inside":
        return "GB/s"
    return f"Gbit/s {'a machine' if cluster.between.shape == 'shared' else 'a device'}"


@lru_cache(maxsize=1)
def tipping_points(found: Search) -> tuple[TippingPoint, ...]:
    """Changes with which another kind of layout would be chosen, the nearest first; if the user named no layout.

    Cached for the last search: the head of a plan and its report both need it, and it takes dozens of searches.
    """
    few = is_quick(found)
    points = [point for link in _links_of(found.cluster) for point in _of_link(found, link)]
    for factors in ((0.8, 0.6), (1.5, 2.0, 4.0)) if few else ((0.7,), (2.0,)):
        points += _of_size(found, "memory", factors)
    for factors in ((0.5, 0.25), (2.0, 4.0, 8.0)) if few else ((0.5,), (4.0,)):
        points += _of_size(found, "batch", factors)
    return tuple(sorted(points, key=lambda point: abs(np.log(point.factor))))


def _links_of(cluster: Cluster) -> list[LinkPlace]:
    links: list[LinkPlace] = ["between"] if cluster.n_nodes > 1 else []
    return [*links, "inside"] if max(island.per_node for island in cluster.islands) > 1 else links


def is_quick(found: Search) -> bool:
    """Whether the whole search is quick enough to be repeated often."""
    return len(found.candidates) + found.n_refused < MANY_LAYOUTS


def searched_with(found: Search, what: TippingQuantity, factor: float) -> Search:
    """The search repeated with this many times the present bandwidth, memory or batch; raises PlaitError where nothing
    fits."""
    workload, cluster = found.workload, found.cluster
    if what == "between" or what == "inside":
        return with_other_links(found, with_faster_links(cluster, what, factor))
    if what == "batch":
        batch = round(workload.batch_sequences * factor)
        if batch < 1:
            raise PlaitError("a batch needs at least one sequence")
        workload = replace(workload, batch_sequences=batch)
    else:
        cluster = with_memory(cluster, factor)
    return search(workload, cluster, profile=found.profile, tolerance=found.tolerance)


def _of_link(found: Search, link: LinkPlace) -> list[TippingPoint]:
    """Tipping points for slower and for faster links: found among representatives, then refined by full searches if
    that is quick."""
    rows = representatives(found)
    names, step_s_on = kinds_of(found.candidates), step_s_elsewhere(found, rows)
    here = int(names[found.chosen])

    def quick(factor: float) -> Choice:
        step_s = step_s_on(with_faster_links(found.cluster, link, factor))
        index = int(rows[simplest(step_s, found.complexity[rows], found.tolerance)])
        return int(names[index]), found.candidates.row(index)

    def whole(factor: float) -> Choice:
        return _choice_with(found, link, factor)

    points = []
    for step in (0.5, 2.0):
        limits = crossing(lambda factor: _differs(quick(factor), here), 1.0, step, step)
        if limits and is_quick(found):
            same, other = limits
            limits = crossing(lambda factor: _differs(whole(factor), here), same**0.7, other, step**0.5)
        if limits and (winner := (whole if is_quick(found) else quick)(limits[1])):
            points.append(TippingPoint(what=link, factor=limits[1], winner=winner[1]))
    return points


def _of_size(found: Search, what: TippingQuantity, factors: Sequence[float]) -> list[TippingPoint]:
    """The first of the factors, going away from 1, at which another kind wins; for memory narrowed down to where one
    wins from there on, not at a single size with the present kind beyond it."""
    here, same = int(kinds_of(found.candidates)[found.chosen]), 1.0
    narrow = what == "memory" and is_quick(found)
    for factor in factors:
        if not (other := _choice_with(found, what, factor)) or other[0] == here:
            same = factor
            continue
        while narrow and max(same / factor, factor / same) > FINE_STEPS:
            middle = (same * factor) ** 0.5
            beyond = middle * FINE_STEPS ** (1 if factor > 1 else -1)
            between = _choice_with(found, what, middle)
            if between and between[0] != here and _differs(_choice_with(found, what, beyond), here):
                factor, other = middle, between
            else:
                same = middle
        return [TippingPoint(what=what, factor=factor, winner=other[1])]
    return []


Choice = tuple[int, CandidateRow] | None
"""The kind and the layout that would be chosen; None where nothing fits."""


def _choice_with(found: Search, what: TippingQuantity, factor: float) -> Choice:
    try:
        other = searched_with(found, what, factor)
    except PlaitError:
        return None
    return int(kinds_of(other.candidates)[other.chosen]), other.candidates.row(other.chosen)


def _differs(choice: Choice, here: int) -> bool:
    return choice is not None and choice[0] != here


def crossing(differs: Callable[[float], bool], same: float, other: float, step: float) -> tuple[float, float] | None:
    """The last factor at which an answer is the present one and, close to it, the first at which it `differs`, looked
    for between `same` and `other` and from there on in steps; None where there is none."""
    if differs(same):
        same, other = 1.0, same
    while not differs(other):
        same, other = other, other * step
        if not 1 / LARGEST_FACTOR_TRIED <= other <= LARGEST_FACTOR_TRIED:
            return None
    while max(same / other, other / same) > FINE_STEPS:
        middle = (same * other) ** 0.5
        same, other = (same, middle) if differs(middle) else (middle, other)
    return same, other


def representatives(found: Search) -> Counts:
    """Indices of the fastest layout of each combination of degrees and of each way to place shards on near or far
    ranks."""
    c = found.candidates
    near = c.tensor * c.context * c.shard <= found.cost_inputs.network.devices_per_node
    keys = np.stack([c.pipeline, c.tensor, c.context, c.expert, c.shard_what, c.schedule, c.recompute, near])
    order = np.lexsort([found.step_s, *keys])
    sorted_keys = keys[:, order]
    first = np.concatenate([[True], (np.diff(sorted_keys, axis=1) != 0).any(axis=0)])
    return np.unique(np.concatenate([[found.chosen, found.fastest], order[first]]))


def step_s_elsewhere(found: Search, rows: Counts) -> Callable[[Cluster], Reals]:
    """From an altered cluster to the seconds of a step of some layouts: what the search found, and by how much the
    closed form changes."""

    def closed_form(cluster: Cluster) -> Reals:
        step_s = np.empty(len(found.candidates))
        for some, inputs in filled_batches(replace(found.cost_inputs, cluster=cluster), rows):
            step_s[some] = estimate_step_time(inputs).step_s
        return step_s[rows]

    beyond = found.step_s[rows] - closed_form(found.cluster)
    return lambda cluster: closed_form(cluster) + beyond


def with_faster_links(cluster: Cluster, link: LinkPlace, factor: float) -> Cluster:
    """The cluster with this many times the bandwidth between its nodes, or between the devices of each node."""
    if link == "between":
        return replace(cluster, between=_faster(cluster.between, factor))
    return replace(
        cluster, islands=tuple(replace(island, inside=_faster(island.inside, factor)) for island in cluster.islands)
    )


def _faster(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_s=link.bytes_per_s * factor)


def with_memory(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with devices of more or less memory."""
    return replace(
        cluster,
        islands=tuple(
            replace(island, device=replace(island.device, memory_bytes=int(island.device.memory_bytes * factor)))
            for island in cluster.islands
        ),
    )


def error_with_suggestions(
    found: DoesNotFit,
    constraints: Constraints,
    profile: SoftwareProfile = PLAIT_PROFILE,
    *,
    starts_from: Literal["nothing", "a base model"] = "nothing",
) -> PlaitError:
    """The error for a model that fits nowhere: what is missing, and what would help, from what costs nothing to what
    changes the model. Each change alone makes it fit. The size of a base model is not ours to choose."""
    workload, cluster = found.workload, found.cluster
    tunes = starts_from == "a base model"
    if constraints and _fits(workload, cluster, profile):
        tried = ["leave [layout] open"]
    else:
        tried = [
            *_shorter(workload, cluster, profile),
            *(_fewer_learning(workload, cluster, profile) if tunes else ()),
            *_more_devices(workload, cluster, profile),
            *_more_memory(found),
            *(() if tunes else _smaller(workload, cluster, profile)),
        ] or ["tune a smaller model" if tunes else "take a smaller model.size"]
    if constraints:
        have = min(island.device.memory_bytes for island in cluster.islands)
        need = f"what [layout] asks for needs {format_bytes(found.least_bytes)} a device, and {found.smallest} has"
        return PlaitError(f"{need} {format_bytes(have)}; {', or '.join(tried)}")
    return PlaitError(f"{found}; cheapest first: {', or '.join(tried)}")


def _fits(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> bool:
    try:
        search(workload, cluster, profile=profile)
    except PlaitError:
        return False
    return True


def _shorter(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> Iterator[str]:
    """Shorter sequences, with as many tokens a step."""
    w = workload
    while w.sequence // 2 >= SHORTEST_SEQUENCE and w.sequence % 2 == 0:
        w = replace(w, sequence=w.sequence // 2, batch_sequences=w.batch_sequences * 2)
        if _fits(w, cluster, profile):
            yield f"train.sequence = {w.sequence}"
            return


def _fewer_learning(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> Iterator[str]:
    """Adapters of a lower rank, or adapters in place of all weights; with shorter sequences where it takes both."""
    if workload.adapter_rank:
        ranks = [workload.adapter_rank >> halvings for halvings in range(1, workload.adapter_rank.bit_length())]
        ways = [
            (f"finetune.rank = {rank}", replace(workload, adapter_rank=rank))
            for rank in ranks
            if rank >= LOWEST_RANK_SUGGESTED
        ]
        if workload.quantization == "none":
            ways.append(('finetune.method = "qlora"', replace(workload, quantization="nf4")))
    elif not workload.experts:
        every = [name for name in get_args(AdapterTarget) if name != "feedforward.gate" or workload.gated]
        adapted = replace(workload, adapter_rank=LEAST_RANK, adapter_targets=tuple(every))
        ways = [
            (f'finetune.method = "lora" and finetune.rank = {LEAST_RANK}', adapted),
            (f'finetune.method = "qlora" and finetune.rank = {LEAST_RANK}', replace(adapted, quantization="nf4")),
        ]
    else:
        ways = []
    for words, fewer in ways:
        if _fits(fewer, cluster, profile):
            yield words
            return
    for words, fewer in ways[-1:]:
        for shorter in _shorter(fewer, cluster, profile):
            yield f"{words} and {shorter}"


def _more_devices(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> Iterator[str]:
    times = 2
    while times <= MOST_DEVICES:
        larger = replace(
            cluster, islands=tuple(replace(island, nodes=island.nodes * times) for island in cluster.islands)
        )
        # The batch grows along, so that every device has something to do.
        grown = replace(workload, batch_sequences=workload.batch_sequences * times)
        if _fits(grown, larger, profile):
            yield f"{times} times as many devices ({larger.n_devices})"
            return
        times *= 2


def _more_memory(found: DoesNotFit) -> Iterator[str]:
    have = min(island.device.memory_bytes for island in found.cluster.islands)
    larger = with_memory(found.cluster, 1.001 * found.least_bytes / have)
    if found.least_bytes < 16 * have and _fits(found.workload, larger, found.profile):
        yield f"devices with {format_bytes(found.least_bytes)} of memory"


def _smaller(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> Iterator[str]:
    for size in reversed(MODEL_SIZES):
        shape = named_shape(size, vocabulary=workload.vocabulary, sequence=workload.sequence)
        smaller = workload_of(
            shape,
            sequence=workload.sequence,
            batch_sequences=workload.batch_sequences,
            precision=workload.precision,
            attention=workload.attention,
            moments=workload.moments,
        )
        smaller = replace(smaller, orthogonalization=workload.orthogonalization)
        if smaller.parameters < workload.parameters and _fits(smaller, cluster, profile):
            yield f'model.size = "{size}" ({format_count(smaller.parameters)} parameters)'
            return
