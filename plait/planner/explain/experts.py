"""What a plan says of experts: what travels, whether expert groups and a pipeline are needed, and at what bandwidth
that turns, whether a pipeline hurts the balance, and how unequal the loads may be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.planner.explain.changes import (
    LARGEST_FACTOR_TRIED,
    LinkPlace,
    crossing,
    is_quick,
    rate_text,
    representatives,
    searched_with,
    step_s_elsewhere,
    with_faster_links,
)
from plait.planner.explain.compared_layouts import slower_than_fastest, time_compared, why_not
from plait.planner.problem.candidates import SHARDED_STATES, Candidates, Counts, Reals
from plait.planner.problem.expert_loads import EARLY_LOAD, busiest_rank_load
from plait.planner.problem.stage_partition import rank_layers
from plait.planner.search.cost_breakdown import time_items
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import bytes_of
from plait.planner.search.layout_kinds import layout_text
from plait.planner.step_time.expert_traffic import exchanges, expert_traffic, most_nodes_met, nodes_met
from plait.units import format_bytes, format_count, format_duration, plain_number

CutAxis = Literal["pipeline", "expert"]
AXIS_BITS = {"pipeline": 4, "expert": 8}
"""The axes' bits in a kind of layout (layout_kinds.kinds_of), above the three of what copies split."""
NEARBY = 1.1
"""Power of a turning point's factor at which a whole search must agree with it."""
AXIS_NAMES: dict[CutAxis, str] = {"expert": "expert parallelism (EP)", "pipeline": "a pipeline (PP)"}
LEAST_LOAD_MENTIONED = 1.005
LOAD_REASONS = {
    "even": "forced to be even",
    "measured": "as the last run of such experts here measured: expert_load_max",
    "bias": "assumed, as a bias balances them: recipe 07 has 1.14 in the end; a run measures expert_load_max",
    "loss": "assumed, as a loss balances them: Qwen3 235B was 1.25 times slower than with routing forced to be even; a "
    "run measures expert_load_max",
    "nothing": "assumed, as nothing balances them; a run measures expert_load_max",
}
"""The source of a busiest expert's load, by Workload.expert_load_from."""


def mixture_lines(found: Search) -> list[str]:
    """The answers about experts, a sentence each; where devices are left out, of all of them."""
    whole = found.left_out.whole if found.left_out else found
    there = f" on all {whole.cluster.n_devices} devices, where a step takes {format_duration(whole.chosen_step_s)}"
    on = there if found.left_out else ""
    return [
        _traffic_line(found),
        *([_axis_line(whole, axis, on) for axis in AXIS_NAMES] if _is_open(whole) else []),
        *([_balance_line(found)] if whole.cluster.n_devices > 1 else []),
        *load_lines(found),
    ]


def _is_open(whole: Search) -> bool:
    """Whether there is a choice of layouts: several devices, and nothing that the recipe settles."""
    return whole.cluster.n_devices > 1 and not whole.constraints


def _traffic_line(found: Search) -> str:
    """The placement of a layer's experts, and the load of their tokens on each link per step."""
    w, one = found.workload, found.candidates.select(np.array([found.chosen]))
    degree, choice = int(one.expert[0]), f"{w.experts_per_token} of {w.experts} experts"
    if degree == 1:
        sharded = one.shard_what[0] == SHARDED_STATES.index("parameters") and one.shard[0] > 1
        all_of_them = (
            f"all {w.experts} experts" if one.tensor[0] == 1 else f"1/{one.tensor[0]} of each of {w.experts} experts"
        )
        where = (
            f"each device gathers {all_of_them} of a layer when it computes it"
            if sharded
            else f"each device holds {all_of_them} of its layers"
        )
        return f"{where}: a token goes to {choice}, and none leaves its device"
    inputs = found.cost_inputs.with_candidates(one)
    traffic = expert_traffic(inputs.network, w, one, found.profile)
    layers = float(rank_layers(w, one).fullest[0]) * w.moe_layers / w.layers
    often = exchanges(one) * layers * int(found.n_microbatches[found.chosen])
    inside, between = (float((often * some)[0]) for some in (traffic.inside, traffic.between))
    sent = [f"{format_bytes(inside)} inside its node"] if inside else []
    sent += [f"{format_bytes(between)} to other nodes"] if between else []
    waits = time_items(found, found.chosen)["experts"]
    share = waits / found.chosen_step_s
    line = (
        f"{degree} devices hold the experts of a layer together, {w.experts // degree} each, and a token goes to "
        f"{choice}: tokens, results and their gradients are {' and '.join(sent)} a device and step, which waits "
        f"{format_duration(waits)} ({share:.0%}) for them"
    )
    return line + (_once_a_node(found, one, between) if between else "")


def _once_a_node(found: Search, one: Candidates, between: float) -> str:
    """What sending each token once to a node would make of the bytes to other nodes, where plait sends it once for each
    expert there."""
    w, network = found.workload, found.cost_inputs.network
    if found.profile.expert_sends == "once a node":
        return ""
    own, once = (
        expert_traffic(network, w, one, replace(found.profile, expert_sends=sends))
        for sends in ("once an expert", "once a node")
    )
    nodes = float(once.nodes[0])
    met, most = float(nodes_met(w, nodes)), most_nodes_met(w, nodes)
    limited = f" (at most {plain_number(most)}: node-limited routing)" if most < min(nodes, w.experts_per_token) else ""
    return (
        f"; a token's experts lie on {plain_number(met, 2)} of {nodes:.0f} nodes on average{limited}, and plait sends "
        "it once for each expert: sent once to a node, as DeepEP does, it would be "
        f"{format_bytes(between * float(once.between[0] / own.between[0]))} to other nodes"
    )


def _axis_line(found: Search, axis: CutAxis, on: str) -> str:
    """Whether expert parallelism, or a pipeline, is needed on this cluster, why, and at what bandwidth that turns; `on`
    says on which devices, where that is not plain."""
    choice = axis_choice(found, axis)
    question = f"is {AXIS_NAMES[axis]} needed{on}?"
    here = bool(getattr(found.candidates, axis)[found.chosen] > 1)
    if choice.with_axis is None:
        return f"{question} No, and no layout with it fits here"
    if choice.without is None:
        there = format_bytes(found.capacity_bytes(found.chosen))
        return (
            f"{question} Yes, no layout without it fits: the leanest takes "
            f"{format_bytes(choice.leanest_without_bytes)} a device, which has {there}"
        )
    other = choice.without if here else choice.with_axis
    layout = layout_text(found.candidates.row(other))
    if choice.pays:
        return (
            f"{question} Yes, for speed: without it, {layout} takes {time_compared(found, other)}{_turn(found, choice)}"
        )
    if here:
        return f"{question} Not for speed: without it, {layout} takes {why_not(found, other)}{_turn(found, choice)}"
    less = (
        f"; the chosen layout is {slower_than_fastest(found, found.chosen)}, and this forecast cannot tell less than "
        f"{found.tolerance:.1%}"
        if found.step_s[other] < found.step_s[found.chosen]
        else ""
    )
    return f"{question} No: with it, {layout} takes {time_compared(found, other)}{less}{_turn(found, choice)}"


def _turn(found: Search, choice: AxisChoice) -> str:
    """At what bandwidth the answer would be another one."""
    where, each = ("between the nodes", "") if choice.link == "between" else ("inside a node", " a device")
    turns = (("below", choice.slower), ("above", choice.faster))
    sides = [f"{side} about {rate_text(found.cluster, choice.link, at)}{each}" for side, at in turns if at]
    if not sides:
        return f"; no bandwidth {where}, {LARGEST_FACTOR_TRIED:.0f} times less or more, would change that"
    at = f"{' and '.join(sides)} {where} (here: {rate_text(found.cluster, choice.link)}{each})"
    if not choice.pays:
        return f". It pays {at}{'' if choice.slower else '; on no slower network'}"
    buys = ": bandwidth buys simplicity" if choice.faster else ""
    return f". {at[0].upper()}{at[1:]} the layout without is as fast{buys}"


def _balance_line(found: Search) -> str:
    """Whether a pipeline spoils what keeps experts equally busy."""
    w = found.workload
    choices = format_count(w.batch_tokens * w.experts_per_token)
    return (
        "does a pipeline hurt the balance? No: a layer and its router stand on one stage, which sees all tokens of a "
        f"step, micro-batch after micro-batch, and counts the same {choices} choices a layer as without a pipeline"
    )


def load_lines(found: Search) -> list[str]:
    """How much more than the mean comes to the busiest device of an expert group, in time and in memory."""
    w, one = found.workload, found.candidates.select(np.array([found.chosen]))
    load = float(busiest_rank_load(w, one)[0])
    if load < LEAST_LOAD_MENTIONED:
        return []
    early = float(busiest_rank_load(w, one, EARLY_LOAD)[0])
    lines = [
        f"the busiest expert gets {plain_number(w.expert_load)} times the mean of its layer "
        f"({LOAD_REASONS[w.expert_load_from]}), and so the busiest of {int(one.expert[0])} devices "
        f"{plain_number(load)} times: it computes and holds more, and the others wait for it in each layer"
    ]
    if early > load:
        then = replace(w, expert_load=EARLY_LOAD)
        more = float((bytes_of(then, one, found.profile) - bytes_of(w, one, found.profile))[0])
        free = found.capacity_bytes(found.chosen) - found.bytes_per_device(found.chosen)
        fits = "which it has" if more <= free else f"of which it has {format_bytes(max(free, 0.0))}"
        lines.append(
            f"in the first steps, before routers have learned, the busiest expert may get {EARLY_LOAD:g} times the "
            f"mean: the device that holds it then needs up to {format_bytes(more)} more, {fits}"
        )
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisChoice:
    """Whether an axis pays, and where the answer turns."""

    axis: CutAxis
    with_axis: int | None
    """Index of the fastest layout with the axis; None where none fits."""
    without: int | None
    leanest_without_bytes: float
    """Bytes a device of the leanest layout without it, whether it fits or not."""
    pays: bool
    link: LinkPlace
    """The link whose bandwidth was altered: between nodes where there are several, else inside one."""
    slower: float | None
    """Times the present bandwidth, below 1, at which the answer turns; None where no slower link turns it."""
    faster: float | None
    """Times the present bandwidth, above 1, at which the answer turns; None if no faster link turns it."""


def axis_choice(found: Search, axis: CutAxis) -> AxisChoice:
    """The answer for one axis: it pays where the fastest layout with it beats the fastest one without by more than the
    forecast can tell."""
    has_axis = getattr(found.candidates, axis) > 1
    with_axis, without = _fastest(found, has_axis), _fastest(found, ~has_axis)
    link: LinkPlace = "between" if found.cluster.n_nodes > 1 else "inside"
    both = with_axis is not None and without is not None
    slower, faster = _turns(found, axis, link) if both else (None, None)
    return AxisChoice(
        axis=axis,
        with_axis=with_axis,
        without=without,
        leanest_without_bytes=min(
            (needed for kind, needed in found.leanest_bytes.items() if not kind // 8 & AXIS_BITS[axis]), default=np.inf
        ),
        pays=with_axis is not None and (without is None or _pays(found, found.step_s, has_axis)),
        link=link,
        slower=slower,
        faster=faster,
    )


def _fastest(found: Search, among: NDArray[np.bool_]) -> int | None:
    return int(np.where(among, found.step_s, np.inf).argmin()) if among.any() else None


def _pays(found: Search, step_s: Reals, has_axis: NDArray[np.bool_]) -> bool:
    return bool(step_s[has_axis].min() * (1 + found.tolerance) < step_s[~has_axis].min())


def _turns(found: Search, axis: CutAxis, link: LinkPlace) -> tuple[float | None, float | None]:
    """The multiples of the present bandwidth, below and above 1, at which the answer turns: found among
    representatives, and where whole searches are quick and say otherwise nearby, by these."""
    rows: Counts = representatives(found)
    has_axis = getattr(found.candidates, axis)[rows] > 1
    step_s_on = step_s_elsewhere(found, rows)
    here = _pays(found, found.step_s[rows], has_axis)

    def quick(factor: float) -> bool:
        return _pays(found, step_s_on(with_faster_links(found.cluster, link, factor)), has_axis) != here

    def whole(factor: float) -> bool:
        other = searched_with(found, link, factor)
        return _pays(other, other.step_s, getattr(other.candidates, axis) > 1) != here

    def turn(step: float) -> float | None:
        limits = crossing(quick, 1.0, step, step)
        if limits is not None and is_quick(found):
            same, other = limits
            if whole(same ** (1 / NEARBY)) or not whole(other**NEARBY):
                limits = crossing(whole, same**0.7, other, step**0.5)
        return limits[1] if limits else None

    return turn(0.5), turn(2.0)
