"""The page as a file: complete in itself, safe against what names hold, and as wide as the screen."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from plait.commands.plan import plan
from plait.commands.planning.plan_report import make_plan_report
from plait.errors import PlaitError
from plait.machines.cluster import Cluster, cluster_from_json, cluster_json, read_cluster
from plait.planner.derive.resources import on_paper
from plait.planner.explain.glossary import GLOSSARY
from plait.planner.heterogeneous.micro_batch_limits import replica_memory_of
from plait.planner.report.figures import Drawing, Picture, number_text, ratio_axis, seconds_unit, time_words
from plait.planner.report.page import page_html, pictures
from plait.planner.report.report import PlanReport, PlanSection
from plait.planner.search.search import search
from plait.recipe.load import load_recipe
from plait.screen.terminal import TerminalScreen
from plait.units import format_bytes
from tests.planner.test_planner_page import piped, workload

ROOT = Path(__file__).parents[2]
EVIL = '</script><img src=x onerror="alert(1)">&'
VOID = {"meta", "br", "hr", "img", "link"}


class Reader(HTMLParser):
    """What a browser would make of the page: its elements with their attributes, and the text of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.opened:
            self.texts.setdefault(self.opened[-1], []).append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert not reader.opened
    return reader


def evil_cluster() -> Cluster:
    values = json.loads(cluster_json(read_cluster("2x(2xA100)+100G")))
    values["name"] = EVIL
    values["islands"][0]["device"] = {"like": "A100", "name": EVIL}
    return cluster_from_json(json.dumps(values), "evil.json")


def chapter(cluster: Cluster, folder: Path) -> PlanReport:
    training = PlanSection(title="train", lines=("first of all",), points=(f"since {EVIL}",))
    return replace(report_on(cluster, folder), machines=EVIL, notes=(EVIL,), training=training)


def report_on(cluster: Cluster, folder: Path, *overrides: str) -> PlanReport:
    (folder / "recipe.toml").write_text('[data]\nfiles = "text.txt"\n')
    asked = ("model.size=350M", "train.sequence=1024", f"train.batch_tokens={64 * 1024}", "train.budget=1B tokens")
    config = load_recipe(folder / "recipe.toml", (*asked, *overrides))
    return make_plan_report(config, on_paper(cluster), top=0)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    return page_html([chapter(evil_cluster(), folder), chapter(read_cluster("H100"), folder)])


def test_each_picture_has_its_figure_and_each_figure_its_values(page: str) -> None:
    reader = read(page)
    titles = [text for text in reader.texts["h3"] if text.strip()]
    assert titles == [
        "Where a step's time goes",
        "What fills a device's memory",
        "Which stage works when",
        "All layouts: fast or simple",
        "What another bandwidth between the nodes would change",
        "The answer in words",
        *titles[6:10],
        "What another bandwidth between devices would change",
        "The answer in words",
    ]
    plots = [values for _, values in reader.elements if values.get("class") == "plot"]
    assert len(plots) == 4 + 3, "neither has a pipeline, the second no link"


def test_names_cannot_become_marks(page: str) -> None:
    reader = read(page)
    assert not any(tag == "img" or "onerror" in values for tag, values in reader.elements)
    shown = "".join(text for tag in ("h2", "p", "li", "a") for text in reader.texts[tag])
    assert shown.count(EVIL) == 1 + 2 + 2 + 2 + 1 + 1 + 1 + 1, (
        "the name twice, and notes, machines, reasons, the fullest device, the key of its line, one node alone"
    )
    pointed_at = [values["data-words"] or "" for _, values in reader.elements if "data-words" in values]
    assert len(pointed_at) > 50 and all(words.strip() for words in pointed_at)


def test_nothing_is_fetched(page: str) -> None:
    reader = read(page)
    for tag, values in reader.elements:
        assert tag not in ("link", "img", "iframe", "object", "script") and "src" not in values
        assert (values.get("href") or "#").startswith("#")
    [guard] = [values["content"] for _, values in reader.elements if "http-equiv" in values]
    assert guard and guard.startswith("default-src 'none'") and "http" not in guard
    assert "@import" not in page and "url(" not in page and "http://" not in page and "https://" not in page


def test_links_of_the_table_lead_to_chapters_and_terms_are_told(page: str, tmp_path: Path) -> None:
    reader = read(page)
    links = [values["href"] for tag, values in reader.elements if tag == "a"]
    anchors = {f"#{values['id']}" for tag, values in reader.elements if tag == "h2" and "id" in values}
    assert len(links) == 2 and set(links) == anchors
    assert set(GLOSSARY) <= set(reader.texts["dt"])
    one = page_html([chapter(read_cluster("H100"), tmp_path)])
    assert "<table" not in one


def test_the_memory_told_is_of_the_device_that_has_least_room_left(tmp_path: Path) -> None:
    asked = ("model.size=1.3B", f"train.batch_tokens={32 * 1024}", "layout.pipeline=2", "layout.schedule=1f1b")
    report = report_on(read_cluster("1x4090+1x3080@10G"), tmp_path, *asked)
    found = report.search
    capacity = found.capacity_bytes(found.chosen)
    one = found.assigner.group_of(found.candidates, found.chosen)
    filled = {
        portion.needed_bytes[rank, 0] / have: have
        for portion in replica_memory_of(found.workload, one, found.profile, found.memory_budget)
        for rank, have in enumerate(portion.capacity_bytes)
    }
    assert len(set(filled.values())) == 2 and capacity == filled[max(filled)]
    told = page_html([report])
    assert f"<dt>memory, of {format_bytes(capacity)}</dt>" in told


@pytest.fixture(scope="module")
def drawings() -> list[Drawing]:
    """Of a layout without a pipeline, of one with halves of backward passes, and of a simple pipeline."""
    found = [search(workload("125M", 1024, 64), read_cluster("8x4090")), piped("zero-bubble", 1), piped("gpipe", 1)]
    shown: list[Picture] = [picture for each in found for picture in pictures(each)]
    return [picture.drawing for picture in shown if picture.drawing]


@pytest.mark.slow
def test_every_figure_stays_inside_its_room_at_any_width(drawings: list[Drawing]) -> None:
    """Places and lengths are shares of the room: nothing is as wide as some screen, and nothing reaches out of it."""
    assert len(drawings) == 4 + 5 + 5
    for drawing in drawings:
        elements = [values for _, values in read(drawing.html).elements if "style" in values]
        assert elements
        for values in elements:
            style = dict(rule.split(":") for rule in (values["style"] or "").split(";"))
            assert not any(value.endswith("px") for name, value in style.items() if name != "--row")
            left, width, bottom = (float(style.get(name, "0%")[:-1]) for name in ("left", "width", "bottom"))
            assert left >= -0.01 and left + width <= 100.01 and -0.01 <= bottom <= 100.01, values


def test_every_colour_that_stands_for_words_is_in_the_legend(drawings: list[Drawing]) -> None:
    for drawing in drawings:
        assert drawing.legend and len({key.colour for key in drawing.legend}) == len(drawing.legend)


@pytest.mark.parametrize(("least", "most"), [(0.9, 1.7), (2, 20), (0.004, 250), (1.5, 102400), (3, 90)])
def test_an_axis_has_a_handful_of_plain_ticks(least: float, most: float) -> None:
    axis = ratio_axis("seconds", least, most)
    assert axis.of_ratios == (most >= 4 * least)
    assert 4 <= len(axis.ticks) <= 10
    assert [float(number_text(tick).replace(",", "")) for tick in axis.ticks] == pytest.approx(axis.ticks)
    shares = [axis.share(value) for value in (least, *axis.ticks, most)]
    assert shares == pytest.approx(sorted(shares)) and (shares[0], shares[-1]) == (0, 1)


def test_units() -> None:
    assert [seconds_unit(s)[1] for s in (600, 2, 0.02, 2e-5)] == ["minutes", "seconds", "milliseconds", "microseconds"]
    assert [time_words(s) for s in (95, 0.25, 0.00483, 2e-5, 0)] == ["1 min 35 s", "0.25 s", "4.83 ms", "20 µs", "0 s"]


def command(folder: Path, *, html: Path) -> None:
    (folder / "recipe.toml").write_text('[data]\nfiles = "text.txt"\n')
    with (folder / "out.txt").open("w") as out:
        plan(
            folder / "recipe.toml",
            ["model.size=350M", "train.sequence=1024"],
            clusters=["8x4090"],
            top=2,
            json_file=None,
            html_file=html,
            screen=TerminalScreen(Console(file=out, width=200)),
        )


def test_the_command_writes_one_small_file_that_needs_no_script(tmp_path: Path) -> None:
    command(tmp_path, html=tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 500_000 and "<script" not in text and "8x4090" in text
    assert {"recipe.toml", "out.txt", "plan.html"} == {path.name for path in tmp_path.iterdir()}


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match="name a file in a folder that exists") as caught:
        command(tmp_path, html=tmp_path / "nowhere" / "plan.html")
    assert caught.value.exit_code == 2
