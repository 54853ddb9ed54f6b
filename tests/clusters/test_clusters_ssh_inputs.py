"""What is sent to machines by ssh of what a recipe reads, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.clusters.ssh import InputFiles, input_files
from plait.errors import PlaitError
from plait.recipe.load import load_recipe


def inputs(folder: Path, *settings: str) -> InputFiles:
    (folder / "texts").mkdir(exist_ok=True)
    (folder / "texts" / "a.txt").write_text("Who is there?\n")
    (folder / "model").mkdir(exist_ok=True)
    (folder / "questions.jsonl").write_text("{}\n")
    (folder / "tokenizer.json").write_text("{}\n")
    recipe = folder / "a.toml"
    recipe.write_text('[data]\nfiles = "texts/a.txt"\n')
    return input_files((str(recipe), *settings), load_recipe(recipe, settings))


def test_every_file_that_a_recipe_reads_is_sent_and_found_over_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sent = inputs(tmp_path, "data.tokenizer=tokenizer.json", "report.choices=questions.jsonl")
    assert [path.name for path in sent.paths] == ["a.toml", "a.txt", "tokenizer.json", "questions.jsonl"]
    (tmp_path / "there").mkdir()
    for path in sent.paths:
        (tmp_path / "there" / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path / "there")
    config = load_recipe(Path("a.toml"), sent.settings)
    read = (config.data.files, config.data.tokenizer, config.report.choices)
    there = tmp_path / "there"
    assert read == ((str(there / "a.txt"),), str(there / "tokenizer.json"), str(there / "questions.jsonl"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("model.from=model",), r"model\.from is the folder .*add model\.from=/ITS/PLACE/THERE"),
        (("data.tokenizer=model",), r"data\.tokenizer is the folder"),
        (("data.files=texts",), "is no single file"),
        (('data.files=["texts/a.txt", "a.txt"]',), "have the same name"),
    ],
)
def test_what_cannot_be_sent_is_said(
    settings: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("another\n")
    with pytest.raises(PlaitError, match=says):
        inputs(tmp_path, *settings)


def test_a_model_whose_place_over_there_is_typed_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sent = inputs(tmp_path, f"model.from={tmp_path}/model")
    assert [path.name for path in sent.paths] == ["a.toml", "a.txt"]
