"""`plait new`: what it writes is a recipe that works as it is, and nothing that was there is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plait.commands.new import SAMPLE_TEXT, new_recipe_text, write_recipe
from plait.errors import PlaitError
from plait.recipe.load import load_recipe


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_by(recipe: str) -> object:
    return load_recipe(Path(recipe)).data.files


def test_in_an_empty_folder_a_sample_text_comes_with_the_recipe(folder: Path) -> None:
    told = write_recipe("first", [])
    assert {path.name for path in folder.iterdir()} == {"first.toml", SAMPLE_TEXT}
    assert "because no text was here" in told[0] and "plait train first.toml" in told[-1]
    assert read_by("first.toml") == str(folder / SAMPLE_TEXT)
    assert (folder / SAMPLE_TEXT).read_text(encoding="utf-8").startswith("ALL'S WELL")


@pytest.mark.parametrize(
    ("there", "named"),
    [
        (["my text.txt"], "my text.txt"),
        (["a.txt", "b.txt", ".hidden.txt"], "*.txt"),
        (["a.txt", "b.txt", "c.jsonl"], ["*.txt", "c.jsonl"]),
        (["notes.md", "picture.png"], "notes.md"),
    ],
)
def test_the_texts_of_the_folder_are_named(folder: Path, there: list[str], named: str | list[str]) -> None:
    for name in there:
        (folder / name).write_text('{"text": "a"}\n')
    write_recipe("mine", [])
    expected = tuple(str(folder / name) for name in named) if isinstance(named, list) else str(folder / named)
    assert read_by("mine.toml") == expected
    assert {path.name for path in folder.iterdir()} == {*there, "mine.toml"}


def test_texts_may_lie_elsewhere_and_have_any_name(folder: Path) -> None:
    odd = 'näme "quoted" \\ back.txt'
    for name in (odd, "other.txt"):
        (folder / name).write_text("words\n")
    write_recipe("one.toml", [odd])
    assert read_by("one.toml") == str(folder / odd)
    write_recipe("two", [odd, "hf:someone/something"])
    assert read_by("two.toml") == (str(folder / odd), "hf:someone/something")


@pytest.mark.parametrize("line", re.findall(r"^# (\w+ = .+)$", new_recipe_text("x", ["a.txt"]), re.MULTILINE))
def test_each_line_that_is_commented_out_works_when_it_is_not(folder: Path, line: str) -> None:
    lines = new_recipe_text("x", ["a.txt"]).splitlines()
    if line.startswith("files"):
        lines.remove('files = "a.txt"')
    lines[lines.index(f"# {line}")] = line
    (folder / "x.toml").write_text("\n".join(lines))
    load_recipe(folder / "x.toml")


def test_what_is_there_stays_and_what_cannot_be_used_leaves_nothing(folder: Path) -> None:
    (folder / "mine.toml").write_text("precious")
    (folder / "dangling.toml").symlink_to(folder / "nowhere")
    (folder / "empty.txt").write_text("")
    before = {path.name for path in folder.iterdir()}
    for name, texts, sentence in (
        ("mine", [], "mine.toml is here already; choose another name"),
        ("dangling", [], "dangling.toml is here already"),
        ("Mine!", [], '"Mine!" is not a name; choose small letters'),
        ("../mine", [], "is not a name"),
        ("Mein Läufer", [], '"Mein Läufer" is not a name; choose small letters'),
        ("Mein Läufer", [], "for example mein-laufer"),
        ("new", ["lost.txt"], 'no file matches "lost.txt"'),
        ("new", ["empty.txt"], "empty.txt is empty; fill it or take it out of --text"),
        ("new", ["mine.toml"], "is of no kind that plait reads"),
    ):
        with pytest.raises(PlaitError, match=re.escape(sentence)):
            write_recipe(name, texts)
    assert {path.name for path in folder.iterdir()} == before
    assert (folder / "mine.toml").read_text() == "precious"


def test_a_folder_that_may_not_be_written_is_one_sentence(folder: Path) -> None:
    (folder / SAMPLE_TEXT).mkdir()
    with pytest.raises(PlaitError, match=r"shakespeare\.txt is here already"):
        write_recipe("new", [])
    assert not (folder / "new.toml").exists()
