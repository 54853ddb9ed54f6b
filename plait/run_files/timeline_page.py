"""A timeline's page: a few steps of each rank as planned and as measured, one above the other.

It needs no script: widths are chosen with radio buttons, and a picture wider than the screen scrolls by touch and arrow
keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files

from plait.planner.report.figures import (
    BLUE,
    BROWN,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    TEAL,
    YELLOW,
    Bar,
    BarRow,
    bars_html,
    time_words,
)
from plait.planner.report.page import document_html
from plait.report.step_timeline import (
    KIND_TEXTS,
    KindTotals,
    Lane,
    RankTimeline,
    SpanKind,
    StepTimeline,
    TimelineSpan,
    busiest_rank,
    totals_of,
)
from plait.units import compared_text, counted, format_bytes

RANKS_DRAWN = 16
EVENTS_LISTED = 250
"""Events of one rank in a step's list; the trace has all of them."""
_ZOOMS = (1, 2, 4, 8, 16)
_NARROW = 0.0008
"""The smallest visible share of a step. Narrower neighbours of one kind are drawn as one."""
WAIT_COLOUR = "repeating-linear-gradient(135deg,#8f8a87 0 1.5px,var(--paper) 1.5px 5px)"
WORK_COLOURS: Mapping[SpanKind, str] = {
    "forward": BLUE,
    "backward": ORANGE,
    "backward-input": ORANGE,
    "backward-weight": YELLOW,
    "gradients": PURPLE,
    "update": GREEN,
    "data": BROWN,
}
MESSAGE_COLOURS: Mapping[SpanKind, str] = {"stage message": TEAL, "gradient sum": PURPLE, "weights": GREEN}
"""Colours of messages; all others are grey."""
_SOURCE_TEXTS = {"planned": "as planned", "measured": "as it was"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePage:
    """The contents of the page: the timeline of a run, and its plan's if the plan has a forecast."""

    run: str
    layout: str
    measured: StepTimeline
    planned: StepTimeline | None
    recorded: str
    """How it was recorded, as a sentence."""


def timeline_html(page: TimelinePage) -> str:
    """The page's HTML, in one self-contained file."""
    measured, planned = page.measured, page.planned
    longest_s = max(end - begin for one in filter(None, (planned, measured)) for begin, end in one.bounds_s)
    first, last = measured.steps[0], measured.steps[-1]
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    bodies = [
        f"<header><h1>Timeline of the run {escape(page.run)}</h1>",
        f'<p class="soft">{escape(page.layout)}, {counted(len(measured.ranks), "worker")}, {which}. '
        f"{escape(page.recorded)}</p></header>",
        "<main>",
        f'<p class="answer">{escape(headline(page))}</p>',
        _facts(page),
        _picture(page, longest_s),
        _kinds_table(page),
        _ranks_table(measured),
        _event_lists(page),
        _notes(page),
        "</main>",
    ]
    style = (files("plait.run_files") / "timeline.css").read_text(encoding="utf-8")
    return document_html(f"plait timeline: {page.run}", bodies, style)


def headline(page: TimelinePage) -> str:
    """A sentence that compares a step with its plan, and names the kind of work that is furthest off."""
    measured, planned = page.measured, page.planned
    took = f"A step took {time_words(measured.step_s)}"
    if planned is None:
        return f"{took}. The plan has no forecast to compare it with."
    than = compared_text(measured.step_s / planned.step_s, "longer", "shorter", than="planned")
    text = f"{took}, {than} ({time_words(planned.step_s)})."
    rank = busiest_rank(measured)
    before, after = (_seconds_by_group(one, rank) for one in (planned, measured))
    group = max(GROUP_TEXTS, key=lambda name: abs(after.get(name, 0.0) - before.get(name, 0.0)))
    return (
        f"{text} On rank {rank}, which works most, the largest difference is {GROUP_TEXTS[group]}: "
        f"{time_words(after.get(group, 0.0))} a step, and {time_words(before.get(group, 0.0))} in the plan."
    )


GROUP_TEXTS = {
    "forward": "forward",
    "backward": "backward",
    "sums": "waiting for sums and weights",
    "stages": "waiting for other stages",
    "within": "waiting for ranks that share its samples",
    "update": "the optimizer's update",
    "data": "waiting for samples",
}
"""The parts of a forecast, in words."""
_GROUPS: Mapping[tuple[Lane, SpanKind], str] = {
    ("work", "forward"): "forward",
    ("work", "backward"): "backward",
    ("work", "backward-input"): "backward",
    ("work", "backward-weight"): "backward",
    ("work", "gradients"): "sums",
    ("work", "update"): "update",
    ("work", "data"): "data",
    ("wait", "stage message"): "stages",
    ("wait", "tensor rows"): "within",
    ("wait", "keys and values"): "within",
    ("wait", "expert tokens"): "within",
}
"""All other waits are for sums and weights."""


def _seconds_by_group(timeline: StepTimeline, rank: int) -> Mapping[str, float]:
    found = dict[str, float]()
    for key, totals in totals_of(timeline, rank).items():
        if key[0] != "message":
            group = _GROUPS.get(key, "sums")
            found[group] = found.get(group, 0.0) + totals.seconds
    return found


_NOTHING = KindTotals(events=0.0, seconds=0.0)
_Row = tuple[tuple[Lane, SpanKind], KindTotals, KindTotals]


def _compared(page: TimelinePage, rank: int) -> Iterator[_Row]:
    """Work and waits of one rank by kind, planned and measured."""
    after = totals_of(page.measured, rank)
    before = totals_of(page.planned, rank) if page.planned else {}
    lanes: Sequence[Lane] = ("work", "wait")
    for lane in lanes:
        for kind in KIND_TEXTS:
            if (lane, kind) in before or (lane, kind) in after:
                yield (lane, kind), before.get((lane, kind), _NOTHING), after.get((lane, kind), _NOTHING)


def _row_name(lane: Lane, kind: SpanKind) -> str:
    return f"waiting: {KIND_TEXTS[kind]}" if lane == "wait" else KIND_TEXTS[kind]


def _facts(page: TimelinePage) -> str:
    """The figures at the top, for the rank that the others wait for."""
    measured = page.measured
    rank = busiest_rank(measured)
    totals = totals_of(measured, rank)
    step_s = measured.step_s
    waits_s = sum(found.seconds for (lane, _), found in totals.items() if lane == "wait")
    worked_s = sum(found.seconds for (lane, _), found in totals.items() if lane == "work")
    everybody = [totals_of(measured, number) for number in range(len(measured.ranks))]
    waiting = sum(found.seconds for one in everybody for (lane, _), found in one.items() if lane == "wait")
    facts = {
        "a step": time_words(step_s),
        "planned": time_words(page.planned.step_s) if page.planned else "no forecast",
        f"rank {rank} works": f"{worked_s / step_s:.0%}",
        f"rank {rank} waits": f"{waits_s / step_s:.0%}",
        "all ranks wait": f"{waiting / len(everybody) / step_s:.0%}",
        "events recorded": f"{sum(len(one.spans) for one in measured.ranks):,}",
    }
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items())
    return f'<dl class="facts">{cells}</dl>'


# The picture.


def _picture(page: TimelinePage, longest_s: float) -> str:
    zooms = "".join(
        f'<label><input type="radio" name="zoom" id="zoom-{zoom}"{" checked" if zoom == 1 else ""}> {zoom} ×</label>'
        for zoom in _ZOOMS
    )
    steps = [_step_html(page, number, longest_s) for number in range(len(page.measured.bounds_s))]
    ranks = len(page.measured.ranks)
    fewer = (
        f" Only the first {RANKS_DRAWN} of {ranks} ranks are drawn; the trace has all." if ranks > RANKS_DRAWN else ""
    )
    return "\n".join(
        [
            '<section class="timeline">',
            f'<p class="caption">All steps have one scale. The upper line of a rank is the plan, the lower one what '
            f"the rank did; thin lines are messages under way. Point at a block, or tap it, to read it.{fewer}</p>",
            f'<fieldset class="zoom"><legend>Width</legend>{zooms}</fieldset>',
            _legend(page),
            *steps,
            "</section>",
        ]
    )


def _legend(page: TimelinePage) -> str:
    every = [span for one in filter(None, (page.planned, page.measured)) for own in one.ranks for span in own.spans]
    work = {span.kind for span in every if span.lane == "work"}
    sent = {span.kind for span in every if span.lane == "message"}
    keys = [(colour, KIND_TEXTS[kind]) for kind, colour in WORK_COLOURS.items() if kind in work]
    keys.append((WAIT_COLOUR, "waiting for others"))
    keys += [(MESSAGE_COLOURS.get(kind, GREY), f"thin: {KIND_TEXTS[kind]}") for kind in KIND_TEXTS if kind in sent]
    items = "".join(f'<li><i style="background:{colour}"></i>{escape(text)}</li>' for colour, text in keys)
    return f'<ul class="legend">{items}</ul>'


def _step_html(page: TimelinePage, number: int, longest_s: float) -> str:
    measured = page.measured
    step = measured.steps[number]
    begin_s, end_s = measured.bounds_s[number]
    blocks = []
    for place in range(min(RANKS_DRAWN, len(measured.ranks))):
        host = measured.ranks[place].host
        title = f"rank {measured.ranks[place].rank}" + (f" · {host}" if host else "")
        rows = [_lanes_html(one, place, number, longest_s) for one in filter(None, (page.planned, measured))]
        blocks.append(f'<div class="rank"><p>{escape(title)}</p>{"".join(rows)}</div>')
    label = f"Step {step}, {time_words(end_s - begin_s)}"
    return (
        f"<h3>{label}</h3>\n"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}: the ranks\' work over time">'
        f'<div class="wide">{"".join(blocks)}'
        f'<p class="ends"><span>0</span><span>{time_words(longest_s / 2)}</span>'
        f"<span>{time_words(longest_s)}</span></p></div></div>"
    )


def _lanes_html(timeline: StepTimeline, place: int, number: int, longest_s: float) -> str:
    """A rank's work in one step, and its messages where there are any."""
    begin_s, end_s = timeline.bounds_s[number]
    step = timeline.steps[number]
    spans = [
        replace(span, start_s=span.start_s - begin_s, end_s=span.end_s - begin_s)
        for span in timeline.ranks[place].spans
        if span.step == step or (span.lane == "message" and span.start_s < end_s and span.end_s > begin_s)
    ]
    work = [span for span in spans if span.lane == "work"]
    waits = [span for span in spans if span.lane == "wait"]
    messages = [span for span in spans if span.lane == "message"]
    name = {"planned": "plan", "measured": "actual"}[timeline.source]
    bars = (*_bars(work, longest_s), *_bars(waits, longest_s))
    rows = bars_html([BarRow(name=name, bars=bars)], whole=longest_s, style=f"lane {timeline.source}", row_px=20)
    if messages:
        thin = [BarRow(name="", bars=tuple(_bars(messages, longest_s)))]
        rows += bars_html(thin, whole=longest_s, style="lane thin", row_px=5)
    return rows


def _bars(spans: Sequence[TimelineSpan], longest_s: float) -> Iterator[Bar]:
    """The spans as bars; narrow neighbours of one kind are one bar."""
    for group in _groups(spans, _NARROW * longest_s):
        first, end_s = group[0], max(span.end_s for span in group)
        start_s = max(0.0, first.start_s)
        if start_s >= longest_s:
            continue
        end_s = min(max(end_s, start_s), longest_s)
        yield Bar(start=start_s, length=end_s - start_s, colour=_colour(first), words=_words(group))


def _groups(spans: Sequence[TimelineSpan], narrow_s: float) -> Iterator[list[TimelineSpan]]:
    group = list[TimelineSpan]()
    for span in spans:
        joins = group and group[-1].kind == span.kind and span.seconds < narrow_s > group[-1].seconds
        if joins and span.start_s - group[-1].end_s < narrow_s:
            group.append(span)
            continue
        if group:
            yield group
        group = [span]
    if group:
        yield group


def _colour(span: TimelineSpan) -> str:
    if span.lane == "wait":
        return WAIT_COLOUR
    return (WORK_COLOURS if span.lane == "work" else MESSAGE_COLOURS).get(span.kind, GREY)


def _words(group: Sequence[TimelineSpan]) -> str:
    first, last = group[0], group[-1]
    when = f"{time_words(max(0.0, first.start_s))} to {time_words(max(0.0, last.end_s))}"
    if len(group) > 1:
        total = time_words(sum(span.seconds for span in group))
        return f"{len(group)} × {_row_name(first.lane, first.kind)}: {total} in all, {when}"
    size = f", {format_bytes(first.n_bytes)}" if first.n_bytes else ""
    return f"{first.name}: {time_words(first.seconds)}, {when}{size}"


# The tables.


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    cells = [
        "".join(
            f'<td data-title="{escape(title)}">{escape(cell)}</td>' for title, cell in zip(titles, row, strict=True)
        )
        for row in rows
    ]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _kinds_table(page: TimelinePage) -> str:
    """Each kind of work and of waiting on the rank that works most, and each kind of message."""
    rank = busiest_rank(page.measured)
    rows = [
        (_row_name(*kind), *_before_and_after(before, after, page.planned is not None))
        for kind, before, after in _compared(page, rank)
    ]
    after = totals_of(page.measured, rank)
    before = totals_of(page.planned, rank) if page.planned else {}
    for kind, text in KIND_TEXTS.items():
        key: tuple[Lane, SpanKind] = ("message", kind)
        if key in after or key in before:
            pair = before.get(key, _NOTHING), after.get(key, _NOTHING)
            rows.append((f"under way: {text}", *_before_and_after(*pair, page.planned is not None)))
    titles = ("of a step", "planned", "as it was", "difference", "events planned", "events")
    return (
        f"<section><h2>Planned and measured, by kind</h2>"
        f'<p class="soft">Means over {counted(len(page.measured.bounds_s), "step")} of rank {rank}, which works most: '
        "the others wait for it. Work excludes the waits in it; messages overlap with work.</p>"
        f"{_table(titles, rows)}</section>"
    )


def _before_and_after(before: KindTotals, after: KindTotals, has_plan: bool) -> tuple[str, str, str, str, str]:
    difference = after.seconds - before.seconds
    sign = "+" if difference >= 0 else "−"
    return (
        time_words(before.seconds) if before.events else ("not planned" if has_plan else "no forecast"),
        time_words(after.seconds) if after.events else "none",
        f"{sign}{time_words(abs(difference))}" if before.events else "",
        f"{before.events:.4g}" if before.events else "",
        f"{after.events:.4g}" if after.events else "0",
    )


def _ranks_table(measured: StepTimeline) -> str:
    """How each rank spent a step."""
    rows = []
    for number, own in enumerate(measured.ranks):
        totals = totals_of(measured, number)
        passes_s = sum(
            found.seconds
            for (lane, kind), found in totals.items()
            if lane == "work" and (kind == "forward" or kind.startswith("backward"))
        )
        other_s = sum(found.seconds for (lane, _), found in totals.items() if lane == "work") - passes_s
        waits_s = sum(found.seconds for (lane, _), found in totals.items() if lane == "wait")
        clock = f"± {time_words(own.clock_error_s)}" if own.clock_error_s else "the same"
        rows.append(
            (
                f"{own.rank}" + (f" on {own.host}" if own.host else ""),
                time_words(passes_s),
                time_words(other_s),
                time_words(waits_s),
                f"{waits_s / measured.step_s:.0%}",
                clock,
            )
        )
    titles = ("rank", "forward and backward", "all else", "waiting", "share of a step", "clock")
    return f"<section><h2>Each rank</h2>{_table(titles, rows)}</section>"


def _event_lists(page: TimelinePage) -> str:
    """The first step, event by event, for each rank: planned and measured side by side."""
    measured, planned = page.measured, page.planned
    step = measured.steps[0]
    parts = []
    for place, own in enumerate(measured.ranks[:RANKS_DRAWN]):
        rows = list(_event_rows(own, planned.ranks[place] if planned else None, step))
        shown = rows[:EVENTS_LISTED]
        more = f"<p>{len(rows) - len(shown):,} more events are in the trace.</p>" if len(rows) > len(shown) else ""
        titles = ("event", "planned from", "for", "began", "took")
        parts.append(
            f"<details><summary>Rank {own.rank}: {len(rows):,} events</summary>{_table(titles, shown)}{more}</details>"
        )
    return f"<section><h2>Step {step}, event by event</h2>{''.join(parts)}</section>"


def _event_rows(own: RankTimeline, plan: RankTimeline | None, step: int) -> Iterator[tuple[str, ...]]:
    """Each event of a rank beside the planned event of the same name, then events that only the plan has."""
    waiting: dict[object, list[TimelineSpan]] = {}
    for span in plan.spans if plan else ():
        if span.step == step:
            waiting.setdefault(span.place, []).append(span)
    spans = [span for span in own.spans if span.step == step]
    began_s = min((span.start_s for span in spans), default=0.0)
    for span in spans:
        like = waiting.get(span.place)
        before = like.pop(0) if like else None
        planned = (time_words(before.start_s), time_words(before.seconds)) if before else ("", "")
        yield span.name, *planned, time_words(span.start_s - began_s), time_words(span.seconds)
    for left in waiting.values():
        for span in left:
            yield span.name, time_words(span.start_s), time_words(span.seconds), "did not happen", ""


def _notes(page: TimelinePage) -> str:
    """The limits of the page."""
    errors = max(own.clock_error_s for own in page.measured.ranks)
    notes = [
        "The plan's line is its schedule's list of actions with the times of its forecast, which covers the busiest "
        "device only: other ranks' passes are derived from their layers and sequences.",
        "A message between stages is drawn until its receiver continued with it. It may have arrived earlier: an "
        "early result waits in memory.",
        "A gradient sum is drawn until its rank noticed its end, which is when it next looked.",
    ]
    if errors:
        notes.append(
            f"Clocks of other machines were compared by messages there and back. Their ranks' lines may be shifted "
            f"against rank 0's by {time_words(errors)} at most."
        )
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<section><h2>How to read it</h2><ul>{items}</ul></section>"
