"""The page's pictures made of bars: where a step's time goes, what fills a device's memory, which stage works when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.partition.pipeline_schedule import ActionKind, schedule_actions
from plait.partition.pipeline_simulation import ActionSpan, Timeline, simulate
from plait.planner.explain.compared_layouts import runners_up
from plait.planner.heterogeneous.unequal_pipeline import unequal_stage_times
from plait.planner.problem.candidates import SCHEDULES
from plait.planner.problem.stage_partition import micro_batches_per_step
from plait.planner.report.figures import (
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    TEAL,
    YELLOW,
    Bar,
    BarRow,
    Drawing,
    LegendKey,
    bars_html,
    ends_html,
    time_words,
)
from plait.planner.search.cost_breakdown import (
    BOTTLENECKS,
    MEMORY_NAMES,
    TIME_NAMES,
    bottlenecks,
    memory_items,
    message_seconds,
    time_items,
)
from plait.planner.search.found import Search
from plait.planner.search.layout_cost import filled_batches, step_time_of
from plait.planner.search.layout_kinds import layout_text
from plait.planner.step_time.pipeline_step_time import stage_times_of
from plait.units import format_bytes

LEAST_TIME_SHARE_SHOWN = 0.004
"""Share of a step from which an item is drawn by itself."""
GROUPS = (*BOTTLENECKS, "all else")
"""Groups of items, named by the bottleneck that they point to."""
GROUP_COLOURS = dict(zip(GROUPS, (BLUE, TEAL, ORANGE, RED, PURPLE, GREY), strict=True))
HIDDEN_COLOUR = "#c9a06f"
LINE_COLOUR = "#7d7875"
RUNNERS_UP_SHOWN = 5
LEAST_MEMORY_SHARE_SHOWN = 0.005
"""Share of a device's memory from which an item is drawn by itself in any of the bars."""
ACTIONS_DRAWN = 6000
"""Actions that a picture may hold; where a step has more, fewer micro-batches are drawn."""
ACTION_COLOURS: dict[ActionKind, tuple[str, str]] = {
    "forward": ("forward: computing what comes out", BLUE),
    "backward": ("backward: finding how each number should change", ORANGE),
    "backward-input": ("backward, the half that the stage before waits for", ORANGE),
    "backward-weight": ("backward, the half that can be put off", YELLOW),
}
ONCE_TEXT = "gradients and optimizer, once a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallBar:
    """One item: it begins where the one before ended."""

    name: str
    group: str
    start_s: float
    spent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """The items of a step's time one after the other; they end at `step_s`."""

    falls: tuple[WaterfallBar, ...]
    step_s: float
    hidden_s: float
    """Messages that travel under arithmetic and so cost nothing."""
    exposed_s: float
    """Messages that devices wait for: among the items."""
    binds: str


def waterfall(found: Search) -> Waterfall:
    """The chosen layout's step, taken apart."""
    items, step_s = time_items(found, found.chosen), found.chosen_step_s
    groups = {name: group for group, names in BOTTLENECKS.items() for name in names}
    seen = {name: spent for name, spent in items.items() if spent >= LEAST_TIME_SHARE_SHOWN * step_s}
    parts = [(TIME_NAMES[name], groups[name], spent) for name, spent in seen.items()]
    rest = step_s - sum(seen.values())
    if rest > 1e-9 * step_s:
        parts.append(("all else", GROUPS[-1], rest))
    falls, start_s = [], 0.0
    for name, group, spent in parts:
        falls.append(WaterfallBar(name=name, group=group, start_s=start_s, spent_s=spent))
        start_s += spent
    hidden, exposed = message_seconds(found, found.chosen)
    return Waterfall(
        falls=tuple(falls), step_s=step_s, hidden_s=hidden, exposed_s=exposed, binds=bottlenecks(items)[0][0]
    )


def waterfall_caption(waterfall: Waterfall) -> str:
    """The picture in words."""
    longest = max(waterfall.falls, key=lambda fall: fall.spent_s)
    words = (
        f"A step takes {time_words(waterfall.step_s)}. The longest item is {longest.name} with "
        f"{longest.spent_s / waterfall.step_s:.0%}; what limits the speed most is {waterfall.binds}."
    )
    if waterfall.hidden_s + waterfall.exposed_s < LEAST_TIME_SHARE_SHOWN * waterfall.step_s:
        return f"{words} Messages between devices take next to nothing."
    return (
        f"{words} Of the messages between devices {time_words(waterfall.exposed_s)} are exposed, that is, devices wait "
        f"for them; {time_words(waterfall.hidden_s)} more are hidden: they travel while devices compute, and cost no "
        f"time."
    )


def draw_waterfall(waterfall: Waterfall) -> Drawing:
    """An item a row, each from where the one above ended; then the sum, and what is hidden."""
    rows = [_time_row(f.name, f.start_s, f.spent_s, GROUP_COLOURS[f.group], waterfall) for f in waterfall.falls]
    rows.append(_time_row("the whole step", 0.0, waterfall.step_s, GREEN, waterfall))
    if waterfall.hidden_s > 0:
        rows.append(_time_row("beside it: hidden messages", 0.0, waterfall.hidden_s, HIDDEN_COLOUR, waterfall))
    seen = [group for group in GROUPS if any(fall.group == group for fall in waterfall.falls)]
    return Drawing(
        html=bars_html(rows, whole=max(waterfall.step_s, waterfall.hidden_s), style="named"),
        legend=tuple(LegendKey(colour=GROUP_COLOURS[g], words=g) for g in seen),
    )


def _time_row(name: str, start_s: float, spent_s: float, colour: str, waterfall: Waterfall) -> BarRow:
    share = f" · {spent_s / waterfall.step_s:.1%}" if spent_s != waterfall.step_s else ""
    words = f"{time_words(spent_s)}{share}"
    bar = Bar(start=start_s, length=spent_s, colour=colour, words=f"{name}: {words}")
    return BarRow(name=name, bars=(bar,), value=words)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One kind of content, with its bytes in every bar."""

    name: str
    bytes_per_device: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBars:
    """A bar for each layout, the chosen one first; the items of a bar add up to what its fullest device needs, or where
    memories differ the one that has least room left."""

    layouts: tuple[str, ...]
    items: tuple[MemoryItem, ...]
    capacities: tuple[tuple[str, float], ...]
    """Kinds of devices with their bytes, the smallest first."""
    held_by: float
    """Memory in bytes of the device that the chosen layout's bar is for."""


def memory_bars(found: Search) -> MemoryBars:
    """Memory on the fullest device of the chosen layout and of a few others."""
    rows = [found.chosen, *runners_up(found, RUNNERS_UP_SHOWN)]
    needed = [memory_items(found, row) for row in rows]
    least = LEAST_MEMORY_SHARE_SHOWN * max(sum(items.values()) for items in needed)
    seen = [name for name in MEMORY_NAMES if any(items[name] >= least for items in needed)]
    items = [
        MemoryItem(name=MEMORY_NAMES[name], bytes_per_device=tuple(each[name] for each in needed)) for name in seen
    ]
    unseen = tuple(sum(size for name, size in each.items() if name not in seen) for each in needed)
    if any(unseen):
        items.append(MemoryItem(name="all else", bytes_per_device=unseen))
    memories = {(island.device.name, float(island.device.memory_bytes)) for island in found.cluster.islands}
    return MemoryBars(
        layouts=tuple(layout_text(found.candidates.row(row)) for row in rows),
        items=tuple(items),
        capacities=tuple(sorted(memories, key=lambda pair: pair[1])),
        held_by=found.capacity_bytes(found.chosen),
    )


def memory_caption(bars: MemoryBars) -> str:
    """The picture in words."""
    needed = sum(item.bytes_per_device[0] for item in bars.items)
    largest = max(bars.items, key=lambda item: item.bytes_per_device[0])
    device = next((name for name, size in bars.capacities if size == bars.held_by), bars.capacities[0][0])
    others = ", then the next best ones of other kinds" if len(bars.layouts) > 1 else ""
    unlike = len({size for _, size in bars.capacities}) > 1
    which, line = ("has least room left", "the line of its kind") if unlike else ("is fullest", "the line")
    return (
        f"The chosen layout needs {format_bytes(needed)} of the {format_bytes(bars.held_by)} that one {device} has, "
        f"the largest part for {largest.name}. The first bar is the chosen layout{others}; each shows the device that "
        f"{which}, and none may pass {line}."
    )


def draw_memory(bars: MemoryBars) -> Drawing:
    """Stacked bars, a layout's words above each, and lines where devices end."""
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(bars.items))]
    rows = [_memory_row(bars, place, colours) for place in range(len(bars.layouts))]
    most = max(sum(item.bytes_per_device[place] for item in bars.items) for place in range(len(bars.layouts)))
    whole = 1.01 * max(most, *(size for _, size in bars.capacities))
    legend = [LegendKey(colour=one, words=item.name) for item, one in zip(bars.items, colours, strict=True)]
    marks = [size for _, size in bars.capacities]
    html = bars_html(rows, whole=whole, style="headed", marks=marks)
    return Drawing(html=html, legend=(*legend, _lines_key(bars)))


def _memory_row(bars: MemoryBars, place: int, colours: Sequence[str]) -> BarRow:
    pieces, start = [], 0.0
    for item, colour in zip(bars.items, colours, strict=True):
        size, words = item.bytes_per_device[place], f"{item.name}: {format_bytes(item.bytes_per_device[place])}"
        pieces.append(Bar(start=start, length=size, colour=colour, words=words, opacity=0.65 if place else 1.0))
        start += size
    name = f"{bars.layouts[place]}: {format_bytes(start)}"
    return BarRow(name=name if place else f"chosen: {name}", bars=tuple(pieces))


def _lines_key(bars: MemoryBars) -> LegendKey:
    """The devices that end at the dashed lines, from the left."""
    ends = ", ".join(f"{name} {format_bytes(size)}" for name, size in bars.capacities)
    return LegendKey(colour=LINE_COLOUR, words=f"{'lines' if len(bars.capacities) > 1 else 'line'}: {ends}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePicture:
    """A step of the chosen pipeline, with as many of its micro-batches as can be seen."""

    timeline: Timeline
    virtual: int
    micros: int
    """Micro-batches of a whole step."""
    drawn: int
    once_s: float
    """Work done once per step and drawn at its end: parameters, gradients, the optimizer."""
    waiting: float
    """Share of a whole step in which the busiest stage waits for the others."""


def pipeline_picture(found: Search) -> PipelinePicture | None:
    """The chosen layout's timeline; None where it has no pipeline."""
    row = found.candidates.row(found.chosen)
    ranks, virtual = int(row["pipeline"]), int(row["virtual"])
    if ranks == 1:
        return None
    group = found.assigner.group_of(found.candidates, found.chosen)
    inputs = found.cost_inputs.with_candidates(group.candidates)
    if group.assignment is not None and not group.assignment.is_even:
        times, micros = unequal_stage_times(inputs, group.assignment, step_time_of(inputs))
    else:
        [(_, filled)] = filled_batches(inputs)
        times = stage_times_of(filled)
        micros = round(float(micro_batches_per_step(filled.workload, filled.candidates)[0]))
    most = ACTIONS_DRAWN // (3 * ranks * virtual)
    drawn = min(micros, max(most - most % ranks, 2 * ranks))
    schedule = SCHEDULES[int(found.candidates.schedule[found.chosen])]
    items = time_items(found, found.chosen)
    return PipelinePicture(
        timeline=simulate(schedule_actions(schedule, ranks=ranks, virtual=virtual, micros=drawn), times),
        virtual=virtual,
        micros=micros,
        drawn=drawn,
        once_s=items["parameters"] + items["gradients"] + items["optimizer"],
        waiting=items["bubble"] / sum(items.values()),
    )


def pipeline_caption(picture: PipelinePicture | None) -> str:
    """The picture in words; without a pipeline, a sentence that there is none."""
    if picture is None:
        return (
            "The chosen layout has no pipeline: every device works on all layers, and none waits for another one's "
            "stage."
        )
    ranks = len(picture.timeline.ranks)
    words = (
        f"The layers stand on {ranks} groups of devices, a line each. Every block is one group's work on one of the "
        f"{picture.micros:,} micro-batches of a step; gaps are waiting (the bubble), {picture.waiting:.1%} of the step "
        f"on the busiest group."
    )
    if picture.virtual > 1:
        words += f" Each group holds {picture.virtual} chunks of layers in turn: the fainter, the later in the model."
    if picture.drawn < picture.micros:
        words += (
            f" Only {picture.drawn} micro-batches are drawn, so that gaps look larger here "
            f"({picture.timeline.bubble:.0%}) than they are."
        )
    return f"{words} At the end come gradients and the optimizer, {time_words(picture.once_s)} once a step."


def draw_pipeline(picture: PipelinePicture) -> Drawing:
    """A line for each rank of the pipeline, a block for each action."""
    ranks, ended_s = len(picture.timeline.ranks), picture.timeline.duration_s
    once = Bar(start=ended_s, length=picture.once_s, colour=GREY, words=f"{ONCE_TEXT}: {time_words(picture.once_s)}")
    every = max(1, ranks // 16)
    rows = [
        BarRow(
            name=f"group {rank + 1}" if rank % every == 0 else "",
            bars=(*(_block(span, picture) for span in spans), once),
        )
        for rank, spans in enumerate(picture.timeline.ranks)
    ]
    kinds = {span.action.kind for spans in picture.timeline.ranks for span in spans}
    legend = [
        LegendKey(colour=colour, words=words) for kind, (words, colour) in ACTION_COLOURS.items() if kind in kinds
    ]
    whole_s = ended_s + picture.once_s
    blocks = bars_html(rows, whole=whole_s, style="numbered", row_px=max(12, min(30, 500 // ranks)))
    return Drawing(
        html=blocks + ends_html(time_words(whole_s)),
        legend=(*legend, LegendKey(colour=GREY, words=ONCE_TEXT)),
    )


def _block(span: ActionSpan, picture: PipelinePicture) -> Bar:
    words, colour = ACTION_COLOURS[span.action.kind]
    chunk = span.action.stage // len(picture.timeline.ranks)
    return Bar(
        start=span.start_s,
        length=span.end_s - span.start_s,
        colour=colour,
        words=f"{words.split(':')[0]} of micro-batch {span.action.micro + 1}, stage {span.action.stage + 1}: "
        f"{time_words(span.start_s)} to {time_words(span.end_s)}",
        opacity=1 - 0.55 * chunk / max(picture.virtual - 1, 1),
    )
