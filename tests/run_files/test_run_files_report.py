"""A report of runs: whole in one file, harmless whatever the run's files say, and right in its figures."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import plait
from plait.cli import app
from plait.errors import PlaitError
from plait.layout import Layout
from plait.report.incidents import append_incident
from plait.report.receipt import ITEM_NAMES
from plait.report.samples_file import SampleReport
from plait.run_files.report_files import report_html, report_markdown
from plait.run_files.run_report import CURVE_POINTS, run_report
from plait.run_folder import find_run
from plait.working_folder import CURRENT_FOLDER, WorkingFolder
from tests.report.test_report_receipt import RECEIPT
from tests.run_files.written_runs import incident_of, written_run

ITEMS = dict(zip(ITEM_NAMES, (0.03, 0.012, 0.008, 0.0), strict=True))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkingFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return CURRENT_FOLDER


class Page(HTMLParser):
    """The tags and attributes of a page, and its text; fails where tags do not match."""

    VOID = frozenset({"meta", "hr", "polyline"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value or "")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)


def html_of(*names: str) -> str:
    return report_html(run_report([find_run(name) for name in names], CURRENT_FOLDER))


def markdown_of(*names: str) -> str:
    return report_markdown(run_report([find_run(name) for name in names], CURRENT_FOLDER))


def finished(here: WorkingFolder, name: str = "first", **values: object):
    receipt = replace(RECEIPT, predicted_items=ITEMS, measured_items=ITEMS | {"data_s": 0.002})
    return written_run(here, name, receipt=receipt, **values)  # pyright: ignore[reportArgumentType]


def test_a_report_holds_recipe_plan_curve_receipt_forecast_and_how_to_repeat(here: WorkingFolder) -> None:
    finished(here)
    for text in (" ".join(Page(html_of("first")).words), markdown_of("first").replace("\\", "")):
        for wanted in (
            'budget = "100 steps"',
            "one device, 1 worker",
            "1.5 per byte",
            "Forecast and fact",
            "optimizer and the rest",
            "None.",
            "torch",
            "2.13.0",
            "plait train first.toml 'train.budget=100 steps' train.sequence=",
            "optimizer.lr=",
        ):
            assert wanted in text, wanted
    reasons = find_run("first").saved_plan().reasons
    assert all(reason in " ".join(Page(html_of("first")).words) for reason in reasons)


def test_the_page_loads_nothing_and_runs_nothing(here: WorkingFolder) -> None:
    finished(here)
    written_run(here, "second", steps_done=40)
    page = Page(html_of("first", "second"))
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    assert not {"src", "href", "action", "srcset", "onclick", "onload"} & page.attributes.keys()
    assert "default-src 'none'; style-src 'unsafe-inline'" in page.attributes["content"]
    assert "url(" not in html_of("first") and "@import" not in html_of("first")


EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&|`](javascript:alert(3))"


def test_what_a_runs_files_say_is_shown_and_not_obeyed(here: WorkingFolder) -> None:
    folder = finished(here, settings={"data.files": EVIL}, reasons=(f"because {EVIL}", "ring \x1b[31mred"))
    append_incident(folder.incidents, incident_of(1, 40, sentence=f"rank 0: {EVIL}", decision="started again"))
    page, text = Page(html_of("first")), markdown_of("first")
    assert not page.tags & {"script", "img"} and "onerror" not in page.attributes
    assert f"because {EVIL}" in " ".join(page.words) and f"rank 0: {EVIL}" in " ".join(page.words)
    outside = re.sub(r"```.*?```", "", text, flags=re.S)
    assert re.search(r"(?<!\\)<", outside) is None and re.search(r"(?<!\\)\]\(", outside) is None
    assert "\x1b" not in text and "\x1b" not in html_of("first")
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) in (3, 4, 5) for row in rows)


def test_code_with_backticks_stays_in_its_fence(here: WorkingFolder) -> None:
    finished(here, settings={"data.files": "a```b.txt"})
    assert "\n````\n[run]" in markdown_of("first") and "a```b.txt" in markdown_of("first")


def test_homes_passwords_and_tokens_are_left_out(here: WorkingFolder, tmp_path: Path) -> None:
    home, token = tmp_path / "home", "hf_" + "a1B2" * 8
    reasons = (f"text from https://me:secret@hub.example/x with {token}", f"cache in {home}/.cache", f"{tmp_path}/runs")
    finished(here, settings={"data.files": f"{home}/texts/play.txt"}, reasons=reasons)
    for text in (html_of("first"), markdown_of("first")):
        assert "secret" not in text and token not in text and str(home) not in text and str(tmp_path) not in text
        assert "~/texts/play.txt" in text and "https://…@hub.example/x" in text and "./runs" in text


def test_a_curve_of_many_steps_has_few_points_and_right_ends(here: WorkingFolder) -> None:
    written_run(here, "first", steps_done=3000, steps=3000, loss=2.0)
    [chapter] = run_report([find_run("first")], CURRENT_FOLDER).sections
    [curve] = next(section.curves for section in chapter[1] if section.curves)
    assert len(curve.steps) == CURVE_POINTS and curve.steps[-1][0] == 3000 * 1024
    assert curve.steps[0][1] == pytest.approx(2 * (2 - 5.5 / 3000)) and curve.held_out == [(3000 * 1024, 2.6 * 1.5)]


def test_the_first_and_the_last_sample_are_shown_as_they_are(here: WorkingFolder) -> None:
    folder = finished(here)
    assert "What it writes" not in markdown_of("first")
    texts = {0: " xq", 50: " left out", 100: f" king\n{EVIL}"}
    lines = [SampleReport(step=step, prompt="The", text=text).to_line() for step, text in texts.items()]
    folder.samples.write_text("\n".join(lines) + "\n")
    shown = f"Before training:\nThe xq\n\nAfter step 100:\nThe king\n{EVIL}"
    assert shown in markdown_of("first") and shown in "".join(Page(html_of("first")).words)
    assert not Page(html_of("first")).tags & {"script", "img"}


def test_several_runs_have_a_table_of_speed_by_workers(here: WorkingFolder) -> None:
    for workers, step_s in ((1, 0.08), (2, 0.05), (4, 0.04)):
        finished(here, f"on{workers}", step_s=step_s, layout=Layout(replicate=workers))
    report = run_report([find_run(name) for name in ("on4", "on1", "on2")], CURRENT_FOLDER)
    table = next(section.table for section in report.sections[0][1] if section.title == "Speed by workers")
    assert table and [(row[0], row[1], row[4], row[5]) for row in table.rows] == [
        ("1", "on1", "1.00", "100%"),
        ("2", "on2", "1.60", "80%"),
        ("4", "on4", "2.00", "50%"),
    ]
    assert "The runs on4, on1 and on2" in html_of("on4", "on1", "on2")


def test_runs_of_other_batches_have_no_such_table_and_of_other_texts_no_common_curve(here: WorkingFolder) -> None:
    finished(here, "one")
    finished(here, "two", layout=Layout(replicate=2), batch_sequences=48, corpus_hash="0" * 64)
    [shared, *_] = run_report([find_run("one"), find_run("two")], CURRENT_FOLDER).sections
    assert "Speed by workers" not in [section.title for section in shared[1]]
    assert not any(section.curves for section in shared[1])
    assert "cannot be compared" in markdown_of("one", "two") and "prepared data are gone" in markdown_of("one", "two")


def test_an_unfinished_run_and_one_without_steps_have_a_report(here: WorkingFolder) -> None:
    written_run(here, "half", steps_done=40, held_out=None)
    written_run(here, "none", steps_done=0, held_out=None)
    assert "stopped, step 40 of 100" in html_of("half") and "stopped, step 0 of 100" in html_of("none")
    assert "The receipt" not in html_of("half") and Page(html_of("half", "none")).words


def test_files_are_written_by_name(here: WorkingFolder) -> None:
    finished(here)
    written = plait.write_report("first", html="r.html", md="r.md")
    assert written == [Path("r.html"), Path("r.md")]
    assert Path("r.html").read_text() == html_of("first") and Path("r.md").read_text() == markdown_of("first")
    done = CliRunner().invoke(app, ["report", "first", "--md", "other.md"])
    assert done.output == "written  other.md\n" and Path("other.md").read_text() == markdown_of("first")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["first"], "plait report writes a file; name it"),
        (["nope", "--md", "r.md"], 'there is no run "nope"'),
        (["half", "--md", "r.md"], "runs/half holds no run that has begun"),
        (["old", "--md", "r.md"], "runs/old/plan.json"),
        (["first", "--html", "nowhere/r.html"], "cannot write nowhere/r.html"),
    ],
)
def test_bad_input_is_a_sentence(here: WorkingFolder, arguments: list[str], sentence: str) -> None:
    finished(here)
    Path("runs/half").mkdir()
    written_run(here, "old").plan.write_text('{"format": 2}')
    ended = CliRunner().invoke(app, ["report", *arguments])
    assert isinstance(ended.exception, PlaitError) and sentence in str(ended.exception)
    assert not Path("r.md").exists()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("plan.json", '"versions": {', '"versions": "none", "other": {'),
        ("metrics.jsonl", '"step_s": 0.05', '"step_s": -1e308'),
        ("metrics.jsonl", '"eval_nats_per_byte": 1.5', '"eval_nats_per_byte": null'),
        ("metrics.jsonl", '"loss": ', '"loss": null, "grad_norm": null, "x": '),
    ],
)
def test_figures_that_no_run_comes_to_are_a_sentence_or_left_out(
    here: WorkingFolder, file: str, old: str, new: str
) -> None:
    """Files that others may have written: never a traceback."""
    finished(here, "good")
    path = finished(here, "odd").path / file
    text = re.sub(r',\s*"sha256": "\w+"', "", path.read_text())
    assert old in text
    path.write_text(text.replace(old, new))
    for call in (lambda: html_of("good", "odd"), lambda: str(plait.compare_runs("good", "odd")), plait.runs):
        with suppress(PlaitError):
            call()
    assert json.dumps([one.to_dict() for one in plait.runs()], allow_nan=False)
