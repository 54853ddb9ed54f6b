"""`plait new`: what it writes is a recipe that works as it is, and nothing that was there is lost."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from plait.commands.new import SAMPLE_TEXT, RecipeText, new_recipe_text, write_recipe
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
        (["a.txt", "b.txt", ".hidden.txt"], ["a.txt", "b.txt"]),
        (["a.txt", "b.txt", "c.jsonl"], ["a.txt", "b.txt", "c.jsonl"]),
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


@pytest.mark.parametrize(
    "line", re.findall(r"^# (\w+ = .+)$", new_recipe_text("x", [RecipeText("a.txt")]), re.MULTILINE)
)
def test_each_line_that_is_commented_out_works_when_it_is_not(folder: Path, line: str) -> None:
    lines = new_recipe_text("x", [RecipeText("a.txt")]).splitlines()
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
        ("new", ["mine.toml"], "has a type that plait does not read; convert it to .txt, "),
        ("new", [], "no file here can be used: empty.txt, which is empty; put a .txt here, or name one with --text"),
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


def test_what_is_put_there_later_is_not_read(folder: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("words\n")
    write_recipe("mine", [])
    (folder / "log.txt").write_text("step 1\n")
    assert read_by("mine.toml") == (str(folder / "a.txt"), str(folder / "b.txt"))


def test_what_is_read_and_what_is_left_out_is_said(folder: Path) -> None:
    (folder / "novel.txt").write_text("Once upon a time. " * 100)
    rows = "".join(f"{n},A film that I have seen {n} times by now.\n" for n in range(20))
    (folder / "reviews.csv").write_text(f"stars,review\n{rows}")
    (folder / "table.csv").write_text("a,b\n1,2\n")
    (folder / "qa.csv").write_text("question,answer\nWho?,Me.\n")
    (folder / "old.txt").write_bytes("Füße".encode("latin1"))
    (folder / "report.pdf").write_bytes(b"%PDF-1.7")
    (folder / "more").mkdir()
    (folder / "more" / "b.txt").write_text("words\n")
    assert write_recipe("mine", []) == [
        'reads    novel.txt (1.76 KiB), reviews.csv (873 B, column "review")',
        "left out old.txt, which is not UTF-8 text at byte 1; convert it from Latin-1:",
        "         iconv -f latin1 -t utf-8 old.txt > old-utf8.txt",
        "left out report.pdf, which is a PDF; make text of it:",
        "         pdftotext report.pdf report.txt",
        "left out table.csv, which has no column of text (its columns: a, b)",
        "left out qa.csv, which holds chats or prompts with answers; a recipe of its own learns them:",
        "         plait new NAME --text qa.csv",
        'left out more, which is a folder with 1 text file; add "more" to files to read it too',
        "wrote    mine.toml, a recipe with comments",
        'later    to add or convert a file: name it under "files" in mine.toml',
        "next     plait data mine.toml   prepares the text and shows what is read",
        "         plait plan mine.toml   shows the model, the time and the memory",
        "         plait train mine.toml  trains it",
    ]
    files = load_recipe(Path("mine.toml")).data.files
    assert isinstance(files, tuple) and files[0] == str(folder / "novel.txt")
    reviews = files[1]
    assert not isinstance(reviews, str) and (Path(reviews.path).name, reviews.field) == ("reviews.csv", "review")
    write_recipe("chat", ["qa.csv"])
    assert read_by("chat.toml") == str(folder / "qa.csv")


def test_many_texts_stand_in_lines_of_their_own_and_very_many_are_a_pattern(folder: Path) -> None:
    names = [f"chapter-{number:04}.txt" for number in range(20)]
    for name in names:
        (folder / name).write_text("words\n")
    said = write_recipe("mine", [])
    assert said[0].endswith("chapter-0005.txt (6 B) and 14 more")
    assert '\n    "chapter-0019.txt",\n]\n' in (folder / "mine.toml").read_text()
    assert read_by("mine.toml") == tuple(str(folder / name) for name in names)
    for number in range(20, 1001):
        (folder / f"chapter-{number:04}.txt").write_text("words\n")
    assert write_recipe("many", [])[0] == "reads    *.txt (5.87 KiB, and what is put here later)"


def test_odd_files_are_a_line_each_and_nothing_outside_is_read(folder: Path) -> None:
    (folder / "zh.csv").write_text("n,body\n" + "1,今天天气很好我们一起去公园散步吧\n" * 5, encoding="utf-8")
    (folder / "both.jsonl").write_text('{"text": "a", "messages": []}\n')
    (folder / "notes.txt").symlink_to("/etc/passwd")
    (folder / "same.csv").symlink_to("zh.csv")
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("words\n")
    (folder / "no.parquet").write_bytes(b"PAR1 not really")
    for name in ("a.epub", "b.json", "c.json"):
        (folder / name).write_text("x")
    said = write_recipe("mine", [])
    assert said[0] == 'reads    same.csv (262 B, column "body"), zh.csv (262 B, column "body")'
    assert said[1:3] == [
        "left out caf\\xe9.txt, which has a name that is not UTF-8; rename it",
        "left out notes.txt, which is a link out of this folder; name it with --text if you want it",
    ]
    assert said[3].startswith(
        'left out both.jsonl, which holds texts ("text") and chats ("messages"); choose data.format'
    )
    assert said[4].startswith("left out no.parquet, which is not a readable Parquet file (")
    assert said[5] == "         not looked at: 1 .epub, 2 .json"


def test_a_file_that_may_not_be_opened_is_left_out(folder: Path) -> None:
    (folder / "a.txt").write_text("words\n")
    (folder / "b.parquet").write_bytes(b"PAR1")
    (folder / "b.parquet").chmod(0)
    if os.access(folder / "b.parquet", os.R_OK):
        pytest.skip("root may open every file")
    said = write_recipe("mine", [])
    assert said[1] == "left out b.parquet, which cannot be opened: permission denied; check its permissions"
