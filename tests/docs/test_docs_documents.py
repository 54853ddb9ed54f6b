"""What README and guides tell people to open, to write and to type is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

import plait
from plait.cli import app
from plait.machines.cluster import read_cluster
from plait.recipe.load import load_recipe
from plait.recipe.schema import RunConfig
from plait.version import wheel_install_line
from tests.docs.documents import DOCUMENTS, GUIDES, ROOT, code_lines, inline_code, name_of, plait_commands

SECTIONS = {
    section: {field.alias or name for name, field in of.annotation.model_fields.items()}  # type: ignore[union-attr]
    for section, of in RunConfig.model_fields.items()
}
TESTED_TORCH = re.findall(r'^TESTED_TORCH = "(.+)"$', (ROOT / "install" / "torch_build.py").read_text(), re.MULTILINE)[
    0
]
PLAIT = typer.main.get_command(app)
COMMANDS = PLAIT.commands  # type: ignore[attr-defined]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
TYPED = [
    (path, words)
    for path in GUIDES
    for line in code_lines(path.read_text(encoding="utf-8"))
    if "plait " in line and line.count("'") % 2 == 0
    for words in plait_commands(line)
    if words
]
NAMED = [
    (path, code)
    for path in DOCUMENTS
    if "log" not in path.stem and "decisions" not in path.parts
    for code in inline_code(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", link):
            file, _, anchor = link.partition("#")
            target = path.parent / file if file else path
            assert target.exists(), link
            assert not anchor or anchor in headings(target), link


def headings(path: Path) -> set[str]:
    """The anchors of a document, as GitHub makes them of its headings."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(("path", "words"), TYPED, ids=lambda each: name_of(each) if isinstance(each, Path) else None)
def test_a_command_in_a_code_block_parses(path: Path, words: list[str]) -> None:
    command = COMMANDS[words[0]]
    if words[1:] == ["--help"]:
        return
    chosen = command.make_context(words[0], words[1:]).params
    named = ROOT / str(chosen.get("recipe"))
    recipe = named if named.is_file() else ROOT / "recipes" / "01-shakespeare.toml"
    load_recipe(recipe, chosen.get("overrides") or [])
    named_clusters = chosen.get("cluster") or []
    for cluster in [named_clusters] if isinstance(named_clusters, str) else named_clusters:
        assert cluster.endswith(".json") or read_cluster(cluster)


@pytest.mark.parametrize("path", GUIDES, ids=name_of)
def test_a_wheel_is_named_by_the_version_that_make_wheel_gives_it(path: Path) -> None:
    named = set(re.findall(r"plait-([\w.]+)-py3-none-any\.whl", path.read_text(encoding="utf-8")))
    assert named <= {plait.__version__}


def test_the_readme_has_the_line_that_a_joining_host_is_told_and_can_be_read_at_once() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert wheel_install_line(plait.__version__, torch=TESTED_TORCH) in text
    assert len(text.splitlines()) <= 150


def test_commands_are_found_in_code_blocks() -> None:
    assert len(TYPED) >= 30
    named = {code.split()[1] for _, code in NAMED if code.startswith("plait ")}
    assert {words[0] for _, words in TYPED} | named >= {*COMMANDS}, "a command of which no document tells"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_named_in_a_sentence_exist(path: Path) -> None:
    for code in (code for where, code in NAMED if where == path):
        words = re.sub(r"[][]", " ", code).split()
        if words[0] == "plait" and len(words) > 1:
            command = PLAIT if words[1].startswith("--") else COMMANDS[words[1]]
            options = {name for parameter in command.params for name in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= options | {"--help"}, code
        if words[0] == "make" and words[1:]:
            assert words[1] in TARGETS, code
        if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks") and "NAME" not in words[2]:
            module = ROOT / words[2].replace(".", "/")
            assert module.is_dir() or module.with_suffix(".py").is_file(), code


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_recipe_keys_named_in_a_sentence_exist(path: Path) -> None:
    for code in (code for where, code in NAMED if where == path):
        found = re.match(r"([a-z]+)\.(?!(?:py|json|html)\b)([a-z_]+)(?![\w.(/])", code)
        if found and found[1] in SECTIONS:
            assert found[2] in SECTIONS[found[1]], code


def test_the_guide_to_recipes_has_every_key_of_the_schema_and_no_other() -> None:
    guide = (ROOT / "docs" / "guide-recipe.md").read_text(encoding="utf-8")
    told: set[str] = set()
    for section, text in re.findall(r"^## \[(\w+)\](.*?)(?=^## |\Z)", guide, re.MULTILINE | re.DOTALL):
        for row in re.findall(r"^\| (`.+?) \|", text, re.MULTILINE):
            told |= {key if "." in key else f"{section}.{key}" for key in re.findall(r"`([\w.]+)`", row)}
    assert told == {f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys}


def test_the_index_names_every_guide() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    guides = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]
    assert [name for name in guides if f"({name})" not in index] == []
