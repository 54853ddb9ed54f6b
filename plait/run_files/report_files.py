"""A report of runs as one file to keep or send: a self-contained HTML page, or a Markdown text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from plait.checked_json import printable
from plait.planner.report.figures import (
    BLUE,
    COLOURS,
    GREY,
    Bar,
    BarRow,
    Drawing,
    LegendKey,
    Picture,
    bars_html,
    chart_html,
    curve_html,
    curves_html,
    dot_html,
    even_axis,
)
from plait.planner.report.page import document_html, figure_html
from plait.run_files.run_report import LossCurve, ReportPart, ReportTable, RunReport
from plait.screen.console import sparkline
from plait.units import format_duration

_SPARKLINE_COLUMNS = 60


def report_html(report: RunReport) -> str:
    """One self-contained page, without network access or scripts."""
    clean = _Cleaner(report.folder)
    return document_html(
        clean(report.title), [f"<h1>{escape(clean(report.title))}</h1>", *_chapters_html(report, clean)]
    )


def _chapters_html(report: RunReport, clean: _Cleaner) -> Iterator[str]:
    for number, (title, sections) in enumerate(report.sections):
        first = "" if number else ' class="first"'
        heading = f"<h2{first}>{escape(clean(title))}</h2>" if len(report.sections) > 1 else ""
        yield f"<section>{heading}"
        yield from (_section_html(section, clean) for section in sections)
        yield "</section>"


def _section_html(section: ReportPart, clean: _Cleaner) -> str:
    def words(text: str) -> str:
        return escape(clean(text))

    picture = _picture_of(section, clean)
    parts = [figure_html(picture) if picture else f"<h3>{words(section.title)}</h3>"]
    parts += [f"<p>{words(line)}</p>" for line in (() if picture else section.lines)]
    if section.facts:
        facts = [f"<dt>{words(name)}</dt><dd>{words(text)}</dd>" for name, text in section.facts]
        tiles = "".join(f"<div>{fact}</div>" for fact in facts)
        as_list = f'<dl class="words">{"".join(facts)}</dl>'
        parts.append(f'<dl class="facts">{tiles}</dl>' if section.facts_as == "tiles" else as_list)
    if table := section.table:
        titles = [words(title) for title in table.titles]
        rows = [[words(cell) for cell in row] for row in table.rows]
        head = "".join(f"<th>{title}</th>" for title in titles)
        cells = [
            "".join(f'<td data-title="{title}">{cell}</td>' for title, cell in zip(titles, row, strict=True))
            for row in rows
        ]
        parts.append(f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
    if section.points:
        parts.append(f"<ul>{''.join(f'<li>{words(point)}</li>' for point in section.points)}</ul>")
    if section.code:
        parts.append(f'<pre style="white-space:pre-wrap;overflow-wrap:anywhere">{words(section.code)}</pre>')
    return "\n".join(parts)


def _picture_of(section: ReportPart, clean: _Cleaner) -> Picture | None:
    """The drawing of a section; its lines say in words what one sees."""
    drawing = _draw_curves(section.curves, clean) if section.curves else _draw_bars(section.bars)
    return drawing and Picture(title=section.title, caption=" ".join(map(clean, section.lines)), drawing=drawing)


def _draw_curves(curves: Sequence[LossCurve], clean: _Cleaner) -> Drawing | None:
    points = [point for curve in curves for point in (*curve.steps, *curve.held_out)]
    if len(points) < 2 or len({tokens for tokens, _ in points}) < 2:
        return None
    most = max(tokens for tokens, _ in points)
    divisor, unit = next((size, word) for size, word in _TOKEN_UNITS if most >= size)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    room = 0.05 * (high - low) or 0.5
    x = even_axis(f"{unit}tokens", 0.0, most / divisor)
    y = even_axis("nats per token", low - room, high + room)
    lines, dots, keys = [], [], []
    for number, curve in enumerate(curves):
        colour, name = COLOURS[number % len(COLOURS)], clean(curve.name)
        line = [(x.share(tokens / divisor), y.share(loss)) for tokens, loss in curve.steps]
        lines.append(curve_html(line, colour, width=2))
        dots += [
            dot_html(x.share(tokens / divisor), y.share(loss), colour, f"{name}, held out: {loss:.4f}")
            for tokens, loss in curve.held_out
        ]
        keys.append(LegendKey(colour=colour, words=name))
    return Drawing(html=chart_html(x, y, f"{curves_html(lines)}{''.join(dots)}"), legend=tuple(keys))


_TOKEN_UNITS = ((1e9, "billion "), (1e6, "million "), (1e3, "thousand "), (0, ""))


def _draw_bars(bars: Sequence[tuple[str, float, float]]) -> Drawing | None:
    whole = max((max(predicted, measured) for _, predicted, measured in bars), default=0.0)
    if whole <= 0:
        return None
    rows = []
    for name, predicted, measured in bars:
        for kind, spent, colour in (("forecast", predicted, GREY), ("measured", measured, BLUE)):
            words = format_duration(spent)
            bar = Bar(start=0.0, length=spent, colour=colour, words=f"{name}, {kind}: {words}")
            rows.append(BarRow(name=f"{name}, {kind}", bars=(bar,), value=words))
    legend = (LegendKey(colour=GREY, words="forecast"), LegendKey(colour=BLUE, words="measured"))
    return Drawing(html=bars_html(rows, whole=whole, style="named"), legend=legend)


# As Markdown.


def report_markdown(report: RunReport) -> str:
    """The same report as text for a wiki or mail; curves are a line of characters."""
    clean = _Cleaner(report.folder)
    lines = [f"# {_escaped(clean(report.title))}", ""]
    for title, sections in report.sections:
        if len(report.sections) > 1:
            lines += [f"## {_escaped(clean(title))}", ""]
        for section in sections:
            lines += _section_markdown(section, clean)
    return "\n".join(lines)


def _section_markdown(section: ReportPart, clean: _Cleaner) -> Iterator[str]:
    def words(text: str) -> str:
        return _escaped(clean(text))

    yield from (f"### {words(section.title)}", "")
    for curve in section.curves:
        ends = f"{curve.steps[0][1]:.4f} to {curve.steps[-1][1]:.4f}" if curve.steps else "no step yet"
        drawn = sparkline([loss for _, loss in curve.steps], _SPARKLINE_COLUMNS, "utf-8")
        held_out = "".join(f", held out {loss:.4f}" for _, loss in curve.held_out[-1:])
        yield from (f"- {words(curve.name)}: `{drawn}` {ends} nats per token in training{held_out}", "")
    yield from (f"{words(line)}\n" for line in (() if section.curves else section.lines))
    tables = [ReportTable(titles=("", ""), rows=section.facts)] if section.facts else []
    tables += [section.table] if section.table else []
    if section.bars:
        rows = [(name, format_duration(one), format_duration(other)) for name, one, other in section.bars]
        tables.append(ReportTable(titles=("of a step", "forecast", "measured"), rows=rows))
    for table in tables:
        yield f"| {' | '.join(words(title) for title in table.titles)} |"
        yield f"|{'---|' * len(table.titles)}"
        yield from (f"| {' | '.join(words(cell) for cell in row)} |" for row in table.rows)
        yield ""
    yield from (f"- {words(point)}" for point in section.points)
    if section.points:
        yield ""
    if section.code:
        text = clean(section.code)
        fence = "`" * max(3, *(len(found) + 1 for found in re.findall("`+", text)), 3)
        yield from (f"{fence}\n{text.rstrip()}\n{fence}", "")


def _escaped(text: str) -> str:
    """One line of text with Markdown's special characters escaped."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", " ".join(text.split()))


class _Cleaner:
    """Removes private and unsafe parts of a text: the paths of the home and the working folder, passwords in addresses,
    tokens of Hugging Face, and control characters of terminals."""

    def __init__(self, folder: Path) -> None:
        places = {str(folder.resolve()): ".", str(folder): ".", str(Path.home()): "~"}
        self._places = {place: places[place] for place in sorted(places, key=len, reverse=True) if len(place) > 1}

    def __call__(self, text: str) -> str:
        for place, short in self._places.items():
            text = re.sub(rf"{re.escape(place)}(?=[/\"'\s,;:)]|$)", short, text)
        text = re.sub(r"(://)[^/@\s]+@", r"\1…@", text)
        return printable(re.sub(r"\bhf_[A-Za-z0-9]{16,}\b", "hf_…", text))
