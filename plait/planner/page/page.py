"""One page that shows a plan: pictures and words in a single file that fetches nothing, for a browser or for paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from plait.errors import PlaitError, installing
from plait.planner.explain.glossary import GLOSSARY
from plait.planner.explain.report import PlanSection
from plait.planner.page.bandwidth import bandwidth_sweep, sweep_caption
from plait.planner.page.bar_charts import draw_memory, draw_pipeline, draw_waterfall
from plait.planner.page.layout_map import layout_map, map_caption
from plait.planner.page.line_charts import draw_map, draw_sweep
from plait.planner.page.memory import memory_bars, memory_caption
from plait.planner.page.pipeline import pipeline_caption, pipeline_picture
from plait.planner.page.time import waterfall, waterfall_caption
from plait.planner.search.cost_breakdown import model_flops_utilisation
from plait.planner.search.found import Search
from plait.planner.search.layout_kinds import layout_text
from plait.report.figures import Drawing
from plait.units import counted, format_bytes, format_count, format_duration

CONTENT_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy: the browser loads nothing from the network, whatever the page contains."""
HEADINGS = {
    "layout": "what was chosen",
    "step": "a step",
    "memory": "memory",
    "why": "why that is enough",
    "experts": "its experts",
    "others": "the next best",
    "listed": "layouts compared",
    "binds": "what limits the speed",
    "changes": "what would change the choice",
    "sure": "how accurate this is",
    "run": "the whole run",
}
"""Short titles of the report's sections, for the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """The plan for one cluster, as a page shows it."""

    found: Search
    parameters: int
    machines: str
    notes: tuple[str, ...]
    """What was derived or assumed about the model and its batch."""
    sections: tuple[PlanSection, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure with its title, what one sees in words, and the drawing where there is something to draw."""

    title: str
    caption: str
    drawing: Drawing | None


def plotly_script() -> str:
    """The script that draws; raises PlaitError where plotly is not installed. Call it before long work."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise PlaitError(f"the page of --html is drawn by plotly; {installing('plotly')}") from None
    return get_plotlyjs()


def page_html(chapters: Sequence[Chapter], script: str) -> str:
    """The page's text; `script` is plotly's, and without it only words show."""
    name = f"plait plan: {_subject(chapters)}"
    bodies = [_chapter(chapter, number) for number, chapter in enumerate(chapters)]
    guard = f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
    parts = [
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{guard}',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(name)}</title>\n<style>\n{_resource('page.css')}</style>\n</head>\n<body>",
        _opening(chapters),
        *bodies,
        _terms(),
        f"<script>{script}</script>\n<script>\n{_resource('page.js')}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def pictures(found: Search) -> tuple[Picture, ...]:
    """The five pictures of a plan."""
    memory, time, stages = memory_bars(found), waterfall(found), pipeline_picture(found)
    layouts, sweep = layout_map(found), bandwidth_sweep(found)
    where = sweep.where if sweep else "between devices"
    return (
        Picture(title="Where a step's time goes", caption=waterfall_caption(time), drawing=draw_waterfall(time)),
        Picture(title="What fills a device's memory", caption=memory_caption(memory), drawing=draw_memory(memory)),
        Picture(
            title="Which stage works when",
            caption=pipeline_caption(stages),
            drawing=draw_pipeline(stages) if stages else None,
        ),
        Picture(title="All layouts: fast or simple", caption=map_caption(layouts), drawing=draw_map(layouts)),
        Picture(
            title=f"What another bandwidth {where} would change",
            caption=sweep_caption(sweep),
            drawing=draw_sweep(sweep) if sweep else None,
        ),
    )


def _subject(chapters: Sequence[Chapter]) -> str:
    """What all chapters are about."""
    models = {f"{format_count(chapter.parameters)} parameters" for chapter in chapters}
    where = f"{len(chapters)} sets of machines" if len(chapters) > 1 else chapters[0].found.cluster.name
    return f"{models.pop()} on {where}" if len(models) == 1 else where


def _opening(chapters: Sequence[Chapter]) -> str:
    lines = [
        f"<h1>A plan for {escape(_subject(chapters))}</h1>",
        '<p class="soft">Every way to lay the model out over the devices was priced; chosen is the simplest of those '
        "that are about as fast as the fastest. All times are forecasts.</p>",
    ]
    if len(chapters) > 1:
        lines.append("<table><tr><th>machines</th><th>a step</th><th>tokens a second</th><th>chosen layout</th></tr>")
        lines += [_table_row(chapter, number) for number, chapter in enumerate(chapters)]
        lines.append("</table>")
    lines.append("<noscript><p>The pictures need JavaScript; the words do without.</p></noscript>")
    return "\n".join(lines)


def _table_row(chapter: Chapter, number: int) -> str:
    found = chapter.found
    step_s = float(found.step_s[found.chosen])
    link = f'<a href="#machines-{number}">{escape(found.cluster.name)}</a>'
    cells = [link, format_duration(step_s), format_count(found.workload.batch_tokens / step_s), _layout(found)]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _layout(found: Search) -> str:
    return escape(layout_text(found.candidates.row(found.chosen)))


def _chapter(chapter: Chapter, number: int) -> str:
    found, first = chapter.found, ' class="first"' if number == 0 else ""
    w = found.workload
    model = f"{format_count(chapter.parameters)} parameters"
    batch = f"{counted(w.batch_sequences, 'sequence', ',')} of {w.sequence:,} tokens a step, {w.precision}"
    lines = [
        f'<section>\n<h2 id="machines-{number}"{first}>{escape(found.cluster.name)}</h2>',
        f'<p class="soft">{model} on {escape(chapter.machines)}; {batch}.</p>',
        *(f'<p class="soft">{escape(note)}.</p>' for note in chapter.notes),
        f'<p class="answer">{_layout(found)}</p>',
        _facts(found),
        *(_figure(picture, f"figure-{number}-{place}") for place, picture in enumerate(pictures(found))),
        f"<h3>The answer in words</h3>\n{_words(chapter.sections)}\n</section>",
    ]
    return "\n".join(lines)


def _facts(found: Search) -> str:
    step_s = float(found.step_s[found.chosen])
    capacity = found.capacity_bytes(found.chosen)
    facts = {
        "a step takes": format_duration(step_s),
        "tokens a second": format_count(found.workload.batch_tokens / step_s),
        "of the arithmetic peak (MFU)": f"{model_flops_utilisation(found, found.chosen)[0]:.0%}",
        f"memory, of {format_bytes(capacity)}": format_bytes(found.bytes_per_device(found.chosen)),
        "points of complexity": str(int(found.complexity[found.chosen])),
        "layouts priced": f"{len(found.candidates):,}",
    }
    cells = "".join(f"<div><dt>{what}</dt><dd>{value}</dd></div>" for what, value in facts.items())
    return f'<dl class="facts">{cells}</dl>'


def _figure(picture: Picture, name: str) -> str:
    lines = [f'<figure>\n<h3>{escape(picture.title)}</h3>\n<p class="caption">{escape(picture.caption)}</p>']
    if drawing := picture.drawing:
        values = json.dumps({"data": drawing.data, "layout": drawing.layout}, separators=(",", ":"), allow_nan=False)
        # In a script element only "<" can end the data early.
        safe = values.replace("<", "\\u003c")
        height = f'style="height:{drawing.layout["height"]}px"'
        keys = "".join(f'<li><i style="background:{key.colour}"></i>{escape(key.words)}</li>' for key in drawing.legend)
        lines += [
            f'<div class="plot" data-figure="{name}" {height}></div>\n<ul class="legend">{keys}</ul>',
            f'<script type="application/json" id="{name}">{safe}</script>',
        ]
    return "\n".join([*lines, "</figure>"])


def _words(sections: Sequence[PlanSection]) -> str:
    rows = [f"<dt>{escape(HEADINGS.get(s.title, s.title))}</dt>\n<dd>{_lines(s.lines)}</dd>" for s in sections]
    return '<dl class="words">\n' + "\n".join(rows) + "\n</dl>"


def _lines(lines: Sequence[str]) -> str:
    """Paragraphs, and a list of those that begin with a dot."""
    plain = "".join(f"<p>{escape(line)}</p>" for line in lines if not line.startswith("· "))
    dotted = "".join(f"<li>{escape(line[2:])}</li>" for line in lines if line.startswith("· "))
    return plain + (f"<ul>{dotted}</ul>" if dotted else "")


def _terms() -> str:
    rows = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in GLOSSARY.items())
    return (
        "<section><h2>The words, for someone new</h2><details open><summary>Each in two sentences</summary>"
        f'<dl class="terms">{rows}</dl></details></section>'
    )


def _resource(name: str) -> str:
    return (files("plait.planner.page") / name).read_text(encoding="utf-8")
