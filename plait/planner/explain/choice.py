"""Why a layout was chosen: what simpler and faster ones lack, which devices it leaves out, what its objectives and
links cost, and what limits its step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from plait.errors import PlaitError
from plait.layout import AXES
from plait.machines.cluster import Cluster, Island
from plait.planner.explain.changes import LARGEST_FACTOR_TRIED, rate_text, tipping_sentences, with_faster_links
from plait.planner.explain.compared_layouts import (
    best_of_kinds,
    complexity_compared,
    recipe_layout_reason,
    slower_than_fastest,
    time_compared,
)
from plait.planner.explain.experts import load_lines
from plait.planner.explain.muon_update import muon_lines
from plait.planner.explain.unequal_devices import unequal_lines, unequal_reasons
from plait.planner.heterogeneous.host_permutations import node_alone
from plait.planner.memory.estimate import estimate_memory
from plait.planner.problem.candidates import SCHEDULES
from plait.planner.problem.stage_partition import stages_of
from plait.planner.search.cost_breakdown import bottlenecks, message_seconds, time_items
from plait.planner.search.found import LeftOut, Search
from plait.planner.search.layout_cost import bytes_of, step_seconds
from plait.planner.search.layout_kinds import kind_text, layout_text
from plait.planner.search.model_error import memory_error
from plait.planner.search.search import search
from plait.planner.step_time.network_model import achieved_bytes_per_s
from plait.units import as_long_text, counted, format_bytes, format_duration, plain_number, slower_text

SIMPLER_KINDS_NAMED = 4
"""Kinds of simpler layouts that the reasons name, the fastest first."""
HOSTS_NAMED = 6
"""Hosts up to which each one that is left out is named."""
FEW_NODES = 8
"""Up to this many nodes it is worth a word whether one of them alone would be as fast."""
LEAST_SHARE_MENTIONED = 0.01
"""Share of a step or of a device's memory from which an item is named."""
UNCUT_KINDS = {
    1: "plain copies of the model",
    2: "copies that split the optimizer state",
    4: "parameters split, nothing else",
}
"""Ways to train on all devices that cut nothing of the model, by their number (layout_kinds.kinds_of)."""
AXIS_TRAFFIC = {
    "pipeline": "results of pipeline stages",
    "replicate": "sums of the copies' gradients",
    "shard": "the shards' gradients and parameters",
    "context": "keys of cut sequences",
    "tensor": "sums of cut matrices",
}
NEEDED_FOR = (
    "all-forward-all-backward is needed only for a loss whose first gradient has to know the whole step (a contrastive "
    "one over the batch), and none of these does"
)


def short_reasons(found: Search) -> tuple[str, ...]:
    """The choice in a few sentences, for the head of a run: why this layout, what limits it, what would change it."""
    if found.cluster.n_devices == 1:
        return (*left_out_lines(found), *quantized_lines(found), *muon_lines(found), *limits(found)[:1])
    return (
        chosen_because(found),
        *left_out_lines(found),
        *island_traffic_lines(found),
        *unequal_lines(found, found.chosen),
        *unequal_reasons(found),
        *load_lines(found),
        *quantized_lines(found),
        *muon_lines(found),
        *limits(found)[:2],
        *([] if found.constraints else tipping_sentences(found)[:2]),
    )


def quantized_lines(found: Search) -> tuple[str, ...]:
    """What frozen matrices in few bits leave free on the device with least room left, and what the same layout would
    need without them; empty where there are none."""
    w = found.workload
    if w.quantization == "none":
        return ()
    needed, there = found.bytes_per_device(found.chosen), found.capacity_bytes(found.chosen)
    layout = found.candidates.select(np.array([found.chosen]))
    plain = estimate_memory(replace(w, quantization="none"), layout, found.profile).reserved[0]
    return (
        f"frozen matrices in {w.quantization}: a device needs {format_bytes(needed)} of {format_bytes(there)}, which "
        f'leaves {format_bytes(there - needed)}; in {8 * w.element_bytes} bits (finetune.method = "lora") this layout '
        f"would need {format_bytes(float(plain))}",
    )


def chosen_because(found: Search) -> str:
    """Why this layout is enough."""
    return recipe_layout_reason(found) if found.constraints else _price_of_simplicity(found)


def objections(found: Search) -> list[str]:
    """Arguments against simpler layouts, and against more devices."""
    by_kind = best_of_kinds(found)
    simpler = by_kind[found.complexity[by_kind] < found.complexity[found.chosen]][:SIMPLER_KINDS_NAMED]
    return [
        *left_out_lines(found),
        *_too_large_lines(found),
        *(
            f"{kind_text(found.candidates.row(int(index)))}: {complexity_compared(found, int(index))} the chosen "
            f"layout, but it takes {time_compared(found, int(index))}"
            for index in simpler
        ),
        *objective_lines(found),
        *island_traffic_lines(found),
        *unequal_reasons(found),
        *idle_machine_lines(found),
    ]


def _price_of_simplicity(found: Search) -> str:
    if found.chosen == found.fastest:
        where = " on the devices that it uses" if found.left_out else ""
        return (
            f"the fastest of {counted(len(found.candidates), 'layout', ',')} that fit{where}; "
            f"none within {found.tolerance:.1%} is simpler"
        )
    if found.complexity[found.chosen] == found.complexity[found.fastest]:
        return f"as simple as the fastest of {counted(len(found.candidates), 'layout', ',')} that fit, and as fast"
    fastest = f"{layout_text(found.candidates.row(found.fastest))}, takes {format_duration(found.best_step_s)}"
    return (
        f"the simplest within {found.tolerance:.1%} of the fastest, which is less than this forecast can tell: the "
        f"fastest, {fastest}; the chosen layout is {slower_than_fastest(found, found.chosen)}"
    )


def _too_large_lines(found: Search) -> list[str]:
    """The ways to train that cut nothing of the model and do not fit."""
    there, lines = found.capacity_bytes(found.chosen), []
    for kind in UNCUT_KINDS:
        if kind in found.kinds_too_large:
            needed = found.leanest_bytes[kind]
            much = (
                f"a device, which has {format_bytes(there)}"
                if needed > there
                else f"of {format_bytes(there)} a device, which leaves too little free ({_memory_doubt(found)})"
            )
            lines.append(f"{UNCUT_KINDS[kind]}: simpler, but this needs {format_bytes(needed)} {much}")
    return lines


def _memory_doubt(found: Search) -> str:
    return f"memory forecasts of such runs are off by {memory_error(found.workload, found.cluster):.1%} in the median"


def limits(found: Search) -> list[str]:
    """The bottleneck of the chosen layout's speed, and whether memory is short."""
    parts = [(what, share) for what, share in bottlenecks(time_items(found, found.chosen)) if share >= 0.05]
    lines: list[str] = ["what the step's time goes into: " + ", ".join(f"{what} {share:.0%}" for what, share in parts)]
    hidden, exposed = message_seconds(found, found.chosen)
    if hidden + exposed > LEAST_SHARE_MENTIONED * found.chosen_step_s:
        more = f"; another {format_duration(hidden)} pass while they compute" if hidden > 0 else ""
        lines.append(f"messages between devices: devices wait {format_duration(exposed)} of a step for them{more}")
    capacity, needed = found.capacity_bytes(found.chosen), found.bytes_per_device(found.chosen)
    if needed > capacity:
        lines += warnings_of(found)
    elif not found.fits_sparingly(found.chosen):
        free = format_bytes(capacity - needed)
        lines.append(
            f"memory is tight: {free} of {format_bytes(capacity)} stay free on a device, and {_memory_doubt(found)}"
        )
    elif needed > 0.85 * capacity or found.kinds_too_large & UNCUT_KINDS.keys():
        lines.append("memory limits the choice: with more of it other layouts would fit, too")
    return lines


def warnings_of(found: Search) -> tuple[str, ...]:
    """Warnings about the chosen layout before it runs."""
    if found.bytes_per_device(found.chosen) <= found.capacity_bytes(found.chosen):
        return ()
    return ("memory is short: this layout fits only if the allocator and the driver waste nothing",)


def devices_text(cluster: Cluster) -> str:
    """The devices of a cluster, by kind: "1 × RTX 4090 + 2 × RTX 3080"."""
    return _counts_text(_counts(cluster))


def left_out_text(found: Search) -> str:
    """The devices that the layout leaves out, by host where a probe knows the hosts; empty where it uses all."""
    if (left := found.left_out) is None:
        return ""
    if hosts := left_out_hosts(left):
        return ", ".join(hosts) if len(hosts) <= HOSTS_NAMED else f"{len(hosts)} hosts"
    return _counts_text(_counts(left.cluster) - _counts(found.cluster))


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
    here_s, all_s = found.chosen_step_s, left.whole.chosen_step_s
    layout = layout_text(left.whole.candidates.row(left.whole.chosen))
    would_take = f"would take {format_duration(all_s)}{_common_precision(found, left.whole)}"
    over_all = f"left out: {left_out_text(found)}; a step over all devices {would_take}"
    if all_s >= here_s:
        return [f"{over_all}, {as_long_text(all_s / here_s)}: {layout}", *_joining_lines(found, left.whole)]
    tolerance = max(found.tolerance, left.whole.tolerance)
    hardly = "less than" if here_s <= (1 + tolerance) * all_s else f"hardly more than the {tolerance:.1%} that"
    more = f"the chosen layout takes {here_s / all_s - 1:.1%} longer, which is {hardly} this forecast can tell"
    return [f"{over_all} ({layout}); {more}", *_joining_lines(found, left.whole)]


def _common_precision(found: Search, whole: Search) -> str:
    """The precision of all devices together and who keeps the others to it, where the chosen ones have another."""
    if whole.workload.precision == found.workload.precision:
        return ""
    lacking = _counts(whole.cluster) - _counts(found.cluster)
    return (
        f" in {whole.workload.precision}, because {' and '.join(lacking)} cannot compute in {found.workload.precision}"
    )


def _joining_lines(found: Search, whole: Search) -> list[str]:
    """The speed of the network between the machines from which on all of them would be used."""
    if whole.cluster.n_nodes == found.cluster.n_nodes:
        return []
    enough_s, factor = found.best_step_s / (1 + max(found.tolerance, whole.tolerance)), 2.0
    while factor <= LARGEST_FACTOR_TRIED:
        faster = with_faster_links(whole.cluster, "between", factor)
        try:
            one = search(whole.workload, faster, profile=whole.profile, constraints=whole.constraints)
        except PlaitError:
            return []
        if one.best_step_s < enough_s:
            rate = rate_text(faster, "between")
            return [f"with about {rate} between the machines it would be worth using all of them"]
        factor *= 2
    return ["no faster network between the machines would make all of them worth using"]


def _counts(cluster: Cluster) -> Counter[str]:
    counts: Counter[str] = Counter()
    for island in cluster.islands:
        counts[island.device.name] += island.n_devices
    return counts


def _counts_text(counts: Counter[str]) -> str:
    return " + ".join(f"{count} × {name}" for name, count in counts.items())


def idle_machine_lines(found: Search) -> list[str]:
    """The time of a step on a single machine of each kind, unless that is the layout."""
    cluster = found.left_out.cluster if found.left_out else found.cluster
    if not 1 < cluster.n_nodes <= FEW_NODES:
        return []
    used: tuple[Island, ...] = found.cluster.islands if found.cluster.n_nodes == 1 else ()
    places = [place for place, island in enumerate(cluster.islands) if replace(island, nodes=1) not in used]
    return [_alone(found, cluster, place) for place in places]


def _alone(found: Search, cluster: Cluster, place: int) -> str:
    island = cluster.islands[place]
    words = f"{island.per_node} × {island.device.name}" if island.per_node > 1 else f"one {island.device.name}"
    one = replace(node_alone(cluster, place, island.per_node), name=words)
    lacks = found.workload.precision == "bf16" and "bf16" not in island.device.peak_flops
    workload = found.left_out.whole.workload if found.left_out and lacks else found.workload
    try:
        alone = search(workload, one, profile=found.profile, tolerance=found.tolerance)
    except PlaitError:
        return f"{words} alone does not hold this model"
    alone_s, step_s = alone.chosen_step_s, found.chosen_step_s
    if alone_s < step_s:
        return f"{words} alone would take {format_duration(alone_s)} a step, less than this: start the run there, alone"
    return f"{words} alone would take {format_duration(alone_s)} a step, {as_long_text(alone_s / step_s)}"


def island_traffic_lines(found: Search) -> list[str]:
    """What crosses the link between islands and what stays inside each, where islands of several nodes have networks
    of their own."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPrice:
    """One order of passes in an otherwise equal layout."""

    step_s: float
    bytes_per_device: float


def objective_lines(found: Search) -> list[str]:
    """What heads in the middle and prediction ahead add to a step, and whether their losses need all forward passes
    before the first backward pass; empty where there are none."""
    w = found.workload
    if w.heads_in_all == 1:
        return []
    plain = replace(w, heads_after=(), predict_ahead=0)
    more = w.flops_per_token("causal") / plain.flops_per_token("causal") - 1
    parts = [f"heads after {' and '.join(map(str, w.heads_after))} layers"] if w.heads_after else []
    parts += [f"{counted(w.predict_ahead, 'token')} predicted further"] if w.predict_ahead else []
    first = f"{' and '.join(parts)} add {more:.0%} to the arithmetic of a step, and nothing to sampling"
    if int(found.candidates.pipeline[found.chosen]) > 1:
        return [first, _order_line(found)]
    together = "without a pipeline each micro-batch goes backward right after its forward pass, heads and all"
    return [first, f"{together}; {NEEDED_FOR}"]


def order_prices(found: Search) -> dict[str, OrderPrice]:
    """The chosen pipeline with one stage a rank, by "1f1b" and by "gpipe" (all forward, then all backward)."""
    one = found.candidates.select(np.array([found.chosen]))
    stages = int(one.pipeline[0])
    split = one.layer_split if isinstance(one.layer_split, str) or len(one.layer_split) == stages else "balanced"
    prices = {}
    for name in ("1f1b", "gpipe"):
        other = replace(
            one, schedule=np.array([SCHEDULES.index(name)]), virtual=np.ones(1, dtype=np.int64), layer_split=split
        )
        inputs = found.cost_inputs.with_candidates(other)
        prices[name] = OrderPrice(
            step_s=float(step_seconds(inputs)[0]),
            bytes_per_device=float(bytes_of(inputs.workload, other, inputs.profile)[0]),
        )
    return prices


def _order_line(found: Search) -> str:
    prices, stages = order_prices(found), int(found.candidates.pipeline[found.chosen])
    one, all_forward = prices["1f1b"], prices["gpipe"]
    split = " + ".join(map(str, stages_of(found.workload, stages, "balanced")))
    texts = [
        f"{format_duration(price.step_s)} a step and {format_bytes(price.bytes_per_device)} on the fullest device"
        for price in (one, all_forward)
    ]
    return (
        f"each head's loss is computed in its own stage's backward pass and waits for no other stage, so 1F1B carries "
        f"all of them (balanced with them, {stages} stages have {split} layers): {texts[0]}; all forward, then all "
        f"backward (gpipe) {texts[1]}, {_order_verdict(found, one, all_forward)}; {NEEDED_FOR}"
    )


def _order_verdict(found: Search, one: OrderPrice, all_forward: OrderPrice) -> str:
    """The better of the two orders on this machine, and why."""
    if all_forward.bytes_per_device > found.capacity_bytes(found.chosen):
        return "more than there is, for it keeps every micro-batch of the step"
    if all_forward.step_s < one.step_s * (1 - 0.005):
        return f"{1 - all_forward.step_s / one.step_s:.1%} faster here, where links are slow and memory is there"
    slower = slower_text(all_forward.step_s / one.step_s) if all_forward.step_s > one.step_s * 1.005 else "no faster"
    return f"{slower}, and it keeps every micro-batch of the step in memory"
