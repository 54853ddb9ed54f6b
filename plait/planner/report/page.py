"""One page that shows a plan: pictures and words in a single file that fetches nothing, for a browser or for paper."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from plait.planner.explain.glossary import GLOSSARY
from plait.planner.report.bandwidth import bandwidth_sweep, draw_sweep, sweep_caption
from plait.planner.report.bars import (
    draw_memory,
    draw_pipeline,
    draw_waterfall,
    memory_bars,
    memory_caption,
    pipeline_caption,
    pipeline_picture,
    waterfall,
    waterfall_caption,
)
from plait.planner.report.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, TEAL, Picture
from plait.planner.report.layout_map import draw_map, layout_map, map_caption
from plait.planner.report.report import PlanReport, PlanSection, run_cost_text, run_time_text
from plait.planner.search.found import Search
from plait.units import format_bytes, format_count, format_duration

CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: the browser loads nothing and runs nothing, regardless of the contents."""
PAGE_HEADINGS = {
    "time": "the whole run",
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
}
"""Short titles of the report's sections, for the page."""
TABLE_TITLES = ("machines", "the whole run", "money", "a step", "tokens a second", "chosen layout")


def page_html(reports: Sequence[PlanReport], before: str = "") -> str:
    """The page's text; `before` is HTML that stands above the plans."""
    bodies = [_chapter(report, number) for number, report in enumerate(reports)]
    return document_html(
        f"plait plan: {_subject(reports)}", [_opening(reports), *([before] if before else []), *bodies, _terms()]
    )


def document_html(name: str, bodies: Sequence[str], more_style: str = "") -> str:
    """A whole page in the style of a plan's, from HTML for its parts; it loads nothing and runs nothing. `more_style`
    is what a page's own pictures need beside the common style sheets."""
    guard = f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">'
    parts = [
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{guard}',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(name)}</title>\n<style>\n{shared_style()}{_resource('page.css')}{more_style}</style>\n</head>\n<body>",
        *bodies,
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def shared_style() -> str:
    """The style sheet of all of plait's pages, with the pictures' colours by name."""
    names = {"blue": BLUE, "teal": TEAL, "orange": ORANGE, "red": RED, "purple": PURPLE, "grey": GREY, "green": GREEN}
    colours = " ".join(f"--{name}: {colour};" for name, colour in names.items())
    return f":root {{ {colours} }}\n{_resource('look.css')}"


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


def _subject(reports: Sequence[PlanReport]) -> str:
    """The subject of all reports."""
    models = {report.model for report in reports}
    where = f"{len(reports)} sets of machines" if len(reports) > 1 else reports[0].cluster
    return f"{models.pop()} on {where}" if len(models) == 1 else where


def _opening(reports: Sequence[PlanReport]) -> str:
    lines = [
        f"<h1>A plan for {escape(_subject(reports))}</h1>",
        '<p class="soft">Every way to lay the model out over the devices was priced; chosen is the simplest of those '
        "that are about as fast as the fastest. All times are forecasts.</p>",
    ]
    if len(reports) > 1:
        lines.append(f"<table><tr>{''.join(f'<th>{title}</th>' for title in TABLE_TITLES)}</tr>")
        lines += [_table_row(report, number) for number, report in enumerate(reports)]
        lines.append("</table>")
    return "\n".join(lines)


def _table_row(report: PlanReport, number: int) -> str:
    link = f'<a href="#machines-{number}">{escape(report.cluster)}</a>'
    step, tokens = format_duration(report.chosen.step_s), format_count(report.tokens_per_s)
    cells = (link, run_time_text(report.run), run_cost_text(report.run), step, tokens, escape(report.layout))
    named = zip(TABLE_TITLES, cells, strict=True)
    shown = "".join(f'<td data-title="{title}">{cell}</td>' for title, cell in named)
    return f"<tr>{shown}</tr>"


def _chapter(report: PlanReport, number: int) -> str:
    first = ' class="first"' if number == 0 else ""
    facts = {
        "the whole run takes": run_time_text(report.run),
        f"memory, of {format_bytes(report.capacity_bytes)}": format_bytes(report.chosen.bytes_per_device),
        "money" if report.money else "money, at public prices": run_cost_text(report.run),
        "a step takes": format_duration(report.chosen.step_s),
        "tokens a second": format_count(report.tokens_per_s),
        "of the arithmetic peak (MFU)": f"{report.mfu:.0%}",
    }
    cells = "".join(f"<div><dt>{what}</dt><dd>{value}</dd></div>" for what, value in facts.items())
    words = "\n".join(map(_section, report.sections))
    lines = [
        f'<section>\n<h2 id="machines-{number}"{first}>{escape(report.cluster)}</h2>',
        f'<p class="soft">{report.model} on {escape(report.machines)}; {report.batch}.</p>',
        *(f'<p class="soft">{escape(note)}.</p>' for note in (*report.notes, *report.reasons)),
        f'<p class="answer">{escape(report.layout)}</p>',
        f'<dl class="facts">{cells}</dl>',
        *map(figure_html, pictures(report.search)),
        f'<h3>The answer in words</h3>\n<dl class="words">\n{words}\n</dl>\n</section>',
    ]
    return "\n".join(lines)


def _section(section: PlanSection) -> str:
    lines = "".join(f"<p>{escape(line)}</p>" for line in section.lines)
    points = "".join(f"<li>{escape(point)}</li>" for point in section.points)
    heading = escape(PAGE_HEADINGS.get(section.title, section.title))
    return f"<dt>{heading}</dt>\n<dd>{lines}{f'<ul>{points}</ul>' if points else ''}</dd>"


def figure_html(picture: Picture) -> str:
    """A picture with its title, what one sees in words, and its legend."""
    lines = [f'<figure>\n<h3>{escape(picture.title)}</h3>\n<p class="caption">{escape(picture.caption)}</p>']
    if drawing := picture.drawing:
        keys = "".join(f'<li><i style="background:{key.colour}"></i>{escape(key.words)}</li>' for key in drawing.legend)
        lines.append(f'<div class="plot">{drawing.html}</div>\n<ul class="legend">{keys}</ul>')
    return "\n".join([*lines, "</figure>"])


def _terms() -> str:
    rows = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in GLOSSARY.items())
    return (
        "<section><h2>The words, for someone new</h2><details open><summary>Each in two sentences</summary>"
        f'<dl class="terms">{rows}</dl></details></section>'
    )


def _resource(name: str) -> str:
    return (files("plait.planner.report") / name).read_text(encoding="utf-8")
