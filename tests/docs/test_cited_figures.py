"""Every figure that README and guides cite from benchmarks/results is the one in the file.

cited.toml holds what is cited, and says what to do after a new run.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.docs.results import ROOT, Figures, figures

CITED: list[tuple[str, str, str]] = [
    (entry["document"], entry["results"], says)
    for entry in tomllib.loads(Path(__file__).with_name("cited.toml").read_text(encoding="utf-8"))["cited"]
    for says in entry["says"]
]
CITING = (
    "README.md",
    "docs/speed.md",
    "benchmarks/published/README.md",
    *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/guide-*.md")),
)

read = cache(figures)


def document(name: str) -> str:
    """A document with each run of blanks as one, so that line ends do not matter."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def cited(says: str, values: Figures) -> str:
    """What the document must say: the figures in their places."""
    return re.sub(r"(?<=\d)%", " %", says.format_map(values))


@pytest.mark.parametrize(("name", "file", "says"), CITED)
def test_a_cited_figure_is_the_one_in_the_results_file(name: str, file: str, says: str) -> None:
    assert cited(says, read(file)) in document(name), f"{name} must say so, by benchmarks/results/{file}"


@pytest.mark.parametrize("name", CITING)
def test_each_results_file_that_a_document_links_to_is_compared_with_it(name: str) -> None:
    linked = set(re.findall(r"results/([\w.-]+\.jsonl?)\)", document(name)))
    assert linked <= {file for _, file, _ in CITED}


@pytest.mark.parametrize(("name", "file"), sorted({(name, file) for name, file, _ in CITED}))
def test_a_document_links_to_the_file_whose_figures_it_cites(name: str, file: str) -> None:
    assert f"results/{file})" in document(name)


def test_one_changed_digit_is_found() -> None:
    name, file, says = next(one for one in CITED if "torch loop" in one[2])
    row = cited(says, read(file))
    for at in (at for at, letter in enumerate(row) if letter.isdigit()):
        changed = f"{row[:at]}{(int(row[at]) + 1) % 10}{row[at + 1 :]}"
        assert changed not in document(name), changed
