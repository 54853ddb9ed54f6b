"""The page's pictures made of bars, as figures: memory, the waterfall of a step, a pipeline's timeline."""

from __future__ import annotations

from plait.partition.pipeline_schedule import ActionKind
from plait.partition.pipeline_simulation import ActionSpan
from plait.planner.page.memory import MemoryBars
from plait.planner.page.pipeline import PipelinePicture
from plait.planner.page.time import GROUPS, Waterfall
from plait.report.figures import (
    ABOVE,
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    GUIDED,
    ORANGE,
    PURPLE,
    RED,
    TEAL,
    YELLOW,
    Drawing,
    LegendKey,
    Values,
    chart_layout,
    five_digits,
    seconds_unit,
    time_words,
    title,
    wrapped_text,
)
from plait.units import format_bytes

GIB = 2**30
GROUP_COLOURS = dict(zip(GROUPS, (BLUE, TEAL, ORANGE, RED, PURPLE, GREY), strict=True))
ACTION_COLOURS: dict[ActionKind, tuple[str, str]] = {
    "forward": ("forward: computing what comes out", BLUE),
    "backward": ("backward: finding how each number should change", ORANGE),
    "backward-input": ("backward, the half that the stage before waits for", ORANGE),
    "backward-weight": ("backward, the half that can be put off", YELLOW),
}
ONCE_TEXT = "gradients and optimizer, once a step"


def draw_memory(bars: MemoryBars) -> Drawing:
    """Stacked bars, a layout's words above each, and lines where devices end."""
    rows = list(range(len(bars.layouts)))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": rows,
            "x": five_digits([size / GIB for size in item.bytes_per_device]),
            "width": 0.36,
            "marker": {"color": COLOURS[place % len(COLOURS)], "opacity": [1.0] + [0.65] * (len(rows) - 1)},
            "hovertext": [f"{item.name}: {format_bytes(size)}" for size in item.bytes_per_device],
            "hoverinfo": "text",
        }
        for place, item in enumerate(bars.items)
    ]
    labels = [
        f"<b>chosen:</b> {wrapped_text(bars.layouts[0], 88)}",
        *(wrapped_text(words, 95) for words in bars.layouts[1:]),
    ]
    notes = [
        {"x": 0, "y": row - 0.2, "text": label, "xanchor": "left", "align": "left"} | ABOVE
        for row, label in enumerate(labels)
    ]
    marks, names = [], []
    for device, size in bars.capacities:
        marks.append(
            {"type": "line", "x0": size / GIB, "x1": size / GIB, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
            | GUIDED
        )
        text = wrapped_text(f"{device}: {format_bytes(size)}", 40)
        names.append({"x": size / GIB, "y": 1, "yref": "paper", "text": text, "xanchor": "right"} | ABOVE)
    layout = chart_layout(
        90 + 62 * len(rows),
        {"title": title("GiB on one device"), "rangemode": "tozero"},
        {"range": [len(rows) - 0.7, -0.85], "showticklabels": False, "showgrid": False},
        barmode="stack",
        shapes=marks,
        annotations=[*notes, *names],
    )
    legend = tuple(LegendKey(colour=COLOURS[i % len(COLOURS)], words=item.name) for i, item in enumerate(bars.items))
    return Drawing(data=tuple(data), layout=layout, legend=legend)


def draw_waterfall(waterfall: Waterfall) -> Drawing:
    """An item a row, each from where the one above ended; then the sum, and what is hidden."""
    longest_s = max(waterfall.step_s, waterfall.hidden_s)
    factor, unit = seconds_unit(longest_s)
    rows = [(f.name, f.start_s, f.spent_s, GROUP_COLOURS[f.group]) for f in waterfall.falls]
    rows.append(("the whole step", 0.0, waterfall.step_s, GREEN))
    if waterfall.hidden_s > 0:
        rows.append(("beside it: hidden messages", 0.0, waterfall.hidden_s, HIDDEN_COLOUR))
    texts = [f"{time_words(spent)} · {spent / waterfall.step_s:.1%}" for _, _, spent, _ in rows]
    texts[len(waterfall.falls)] = time_words(waterfall.step_s)
    # Text goes to the side of a bar that has room for it.
    left = [(start + spent) > 0.75 * longest_s > 2 * spent for _, start, spent, _ in rows]
    inside = [spent > 0.3 * longest_s for _, _, spent, _ in rows]
    notes = []
    for row, (_, start, spent, _) in enumerate(rows):
        place, anchor = (start, "right") if left[row] else (start + spent, "right" if inside[row] else "left")
        white = {"font": {"color": "white"}} if inside[row] and not left[row] else {}
        notes.append(
            {"x": place * factor, "y": row, "text": texts[row], "xanchor": anchor, "yanchor": "middle"}
            | {"showarrow": False, **white}
        )
    data = {
        "type": "bar",
        "orientation": "h",
        "y": list(range(len(rows))),
        "base": five_digits([start * factor for _, start, _, _ in rows]),
        "x": five_digits([spent * factor for _, _, spent, _ in rows]),
        "marker": {"color": [colour for *_, colour in rows]},
        "hovertext": [f"{wrapped_text(name, 60)}: {text}" for (name, *_), text in zip(rows, texts, strict=True)],
        "hoverinfo": "text",
    }
    names = {"tickvals": data["y"], "ticktext": [wrapped_text(name, 26) for name, *_ in rows], "showgrid": False}
    layout = chart_layout(
        100 + 42 * len(rows),
        {"title": title(f"{unit} from the step's beginning"), "rangemode": "tozero"},
        {"range": [len(rows) - 0.5, -0.5], **names},
        annotations=notes,
    )
    seen = [group for group in GROUPS if any(fall.group == group for fall in waterfall.falls)]
    return Drawing(data=(data,), layout=layout, legend=tuple(LegendKey(colour=GROUP_COLOURS[g], words=g) for g in seen))


HIDDEN_COLOUR = "#c9a06f"


def draw_pipeline(picture: PipelinePicture) -> Drawing:
    """A line for each rank of the pipeline, a block for each action."""
    ranks = len(picture.timeline.ranks)
    ended_s = picture.timeline.duration_s
    factor, unit = seconds_unit(ended_s + picture.once_s)
    by_kind: dict[ActionKind, list[tuple[int, ActionSpan]]] = {}
    for rank, spans in enumerate(picture.timeline.ranks):
        for span in spans:
            by_kind.setdefault(span.action.kind, []).append((rank, span))
    data = [_blocks(kind, found, picture) for kind, found in by_kind.items()]
    data.append(
        {
            "type": "bar",
            "orientation": "h",
            "y": list(range(ranks)),
            "base": [ended_s * factor] * ranks,
            "x": [picture.once_s * factor] * ranks,
            "marker": {"color": GREY},
            "hovertext": f"{ONCE_TEXT}: {time_words(picture.once_s)}",
            "hoverinfo": "text",
        }
    )
    every = max(1, ranks // 16)
    names = {"tickvals": list(range(0, ranks, every)), "ticktext": [f"group {r + 1}" for r in range(0, ranks, every)]}
    layout = chart_layout(
        100 + max(14, min(34, 500 // ranks)) * ranks,
        {"title": title(f"{unit} from the step's beginning"), "rangemode": "tozero"},
        {"range": [ranks - 0.5, -0.5], "showgrid": False, **names},
        bargap=0.12,
    )
    legend = [
        LegendKey(colour=ACTION_COLOURS[kind][1], words=ACTION_COLOURS[kind][0])
        for kind in ACTION_COLOURS
        if kind in by_kind
    ]
    return Drawing(data=tuple(data), layout=layout, legend=(*legend, LegendKey(colour=GREY, words=ONCE_TEXT)))


def _blocks(kind: ActionKind, found: list[tuple[int, ActionSpan]], picture: PipelinePicture) -> Values:
    words, colour = ACTION_COLOURS[kind]
    factor, unit = seconds_unit(picture.timeline.duration_s + picture.once_s)
    ranks = len(picture.timeline.ranks)
    chunks = [span.action.stage // ranks for _, span in found]
    return {
        "type": "bar",
        "orientation": "h",
        "y": [rank for rank, _ in found],
        "base": five_digits([span.start_s * factor for _, span in found]),
        "x": five_digits([(span.end_s - span.start_s) * factor for _, span in found]),
        "marker": {
            "color": colour,
            "opacity": five_digits([1 - 0.55 * chunk / max(picture.virtual - 1, 1) for chunk in chunks]),
            "line": {"width": 0.5, "color": "rgba(128,128,128,0.6)"},
        },
        "customdata": [[span.action.micro + 1, span.action.stage + 1] for _, span in found],
        "hovertemplate": f"{words.split(':')[0]}<br>micro-batch %{{customdata[0]}}, stage %{{customdata[1]}}<br>"
        f"from %{{base:.4g}} to %{{x:.4g}} {unit}<extra></extra>",
    }
