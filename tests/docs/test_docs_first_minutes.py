"""docs/first-ten-minutes.md shows what the commands print, word for word; UPDATE_GOLDEN=1 writes its screens again."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.commands.monitoring.session import stopping_text
from plait.commands.monitoring.training import stopped_text
from plait.commands.plan import WHY_HINT, plan
from plait.commands.planning.introduction import run_start
from plait.commands.planning.plan_report import make_plan_report, plan_summary_text, training_section
from plait.commands.preparing.corpus import corpus_facts, heldout_lines, learnt_facts, prepared_corpus
from plait.commands.train import continuing_command
from plait.hosts.joining import ONE_HOST
from plait.planner.derive.resources import Resources
from plait.planner.plan import Plan
from plait.recipe.load import load_recipe
from plait.screen.screen import SilentScreen, wrapped
from plait.working_folder import CURRENT_FOLDER
from tests.docs.documents import ROOT
from tests.planner.machines import LAPTOP, PEAK_FLOPS, planned

PAGE = ROOT / "docs" / "first-ten-minutes.md"
RECIPE = Path("first.toml")
STOPPED_AT = 200


def write_folder(folder: Path) -> None:
    """The folder of the page: a novel of 750 KB, reviews in a table, and a PDF."""
    (folder / "novel.txt").write_bytes((ROOT / "recipes" / "shakespeare.txt").read_bytes()[:750_000])
    rows = [f'"Good, but {number} pages are too many for me.",{number % 5 + 1}' for number in range(90, 290)]
    (folder / "reviews.csv").write_text("\n".join(["text,stars", *rows]) + "\n")
    (folder / "scan.pdf").write_bytes(b"%PDF-1.7\n" + bytes(range(256)) * 8)


def typed(*arguments: str) -> str:
    """What a command prints on 80 columns."""
    done = CliRunner().invoke(app, arguments, prog_name="plait", env={"COLUMNS": "80"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return wrapped(done.stdout, 80)


class EightyColumns(SilentScreen):
    """A terminal of 80 columns, whose lines are kept."""

    columns = 80

    def __init__(self) -> None:
        self.said: list[str] = []

    def print(self, text: str) -> None:
        self.said.append(wrapped(text, 80))


def planned_for_clusters(*clusters: str) -> str:
    screen = EightyColumns()
    plan(RECIPE, ["model.size=25M"], clusters=clusters, top=10, json_file=None, screen=screen)
    return "\n".join(screen.said)


def planned_for_the_laptop() -> str:
    here = make_plan_report(load_recipe(RECIPE), Resources(machine=LAPTOP, peak_flops=PEAK_FLOPS[LAPTOP]), top=10)
    first = training_section(None, here.layouts, here.plan.placement.layout)
    return f"{plan_summary_text(replace(here, training=first), 80)}\n{WHY_HINT}"


def laptop_plan() -> Plan:
    config = load_recipe(RECIPE)
    return planned(config, corpus_facts(prepared_corpus(config, CURRENT_FOLDER, SilentScreen())), LAPTOP)


def training_begins() -> str:
    config = load_recipe(RECIPE)
    corpus = prepared_corpus(config, CURRENT_FOLDER, SilentScreen())
    told = [str(learnt_facts(config, corpus)), *heldout_lines(corpus), run_start(laptop_plan(), Path("runs/first"))]
    return wrapped("\n".join(told), 80)


def training_stops() -> str:
    again = continuing_command(RECIPE, [], ONE_HOST, "new layouts")
    stopped = wrapped(f"{stopping_text('SIGINT')}\n{stopped_text(STOPPED_AT, 0, laptop_plan())}", 80)
    return f"{stopped}\nnext     {again}"


SCREENS: Mapping[str, Callable[[], str]] = {
    "$ ls": lambda: "  ".join(sorted(path.name for path in Path().iterdir() if path.suffix != ".toml")),
    "$ plait plan first.toml": planned_for_the_laptop,
    "$ plait plan first.toml model.size=25M --cluster 4090 --cluster 8xH100": partial(
        planned_for_clusters, "4090", "8xH100"
    ),
    "$ plait train first.toml": training_begins,
    "^C": training_stops,
}
"""What is shown below these lines; below all others what the command prints here."""


def screen_below(line: str) -> str:
    made = SCREENS.get(line) or partial(typed, *shlex.split(line)[2:])
    return "\n".join(text.rstrip() for text in made().strip("\n").splitlines())


def test_the_page_shows_what_the_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    blocks = re.split(r"(?:(?<=\n\n)|^)((?: {4}.*\n|\n(?= {4}))+)", PAGE.read_text(encoding="utf-8"))
    shown = 0
    for number, block in enumerate(blocks):
        begins = block.split("\n")[0].strip()
        if block.startswith("    ") and begins.startswith(("$ ", "^C")):
            lines = [begins, *screen_below(begins).splitlines()]
            assert max(map(len, lines)) <= 80
            blocks[number] = "".join(f"    {line}".rstrip() + "\n" for line in lines)
            shown += 1
    assert shown == 8
    text = "".join(blocks)
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(text, encoding="utf-8")
    assert text == PAGE.read_text(encoding="utf-8"), f"{PAGE} says otherwise; write it again by UPDATE_GOLDEN=1"
