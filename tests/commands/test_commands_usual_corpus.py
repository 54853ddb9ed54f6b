"""A plan takes exact facts of prepared text, estimated ones of text that is here, else usual ones."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from plait.commands.preparing.corpus import corpus_facts, prepared_corpus
from plait.commands.preparing.usual_corpus import corpus_facts_or_usual
from plait.errors import PlaitError
from plait.planner.derive.model_size import CorpusFacts
from plait.recipe.load import load_recipe
from plait.screen.screen import SilentScreen
from plait.working_folder import WorkingFolder
from tests.matrix import slow
from tests.planner.machines import recipe


def test_a_budget_in_epochs_needs_the_text(tmp_path: Path) -> None:
    working = WorkingFolder(tmp_path)
    facts, notes = corpus_facts_or_usual(recipe(tmp_path, "model.size=1M", "train.budget=20 steps"), working)
    assert facts.train_tokens > 10**12 and notes
    with pytest.raises(
        PlaitError, match=r'train\.budget = "3 epochs" depends on the text, which is not here; bring it here'
    ):
        corpus_facts_or_usual(recipe(tmp_path, "model.size=1M", "train.budget=3 epochs"), working)


def prepared_and_estimated(folder: Path, texts: dict[str, str]) -> tuple[CorpusFacts, CorpusFacts, str]:
    """The exact facts of files in a folder, those estimated before, and the sentence about these."""
    for name, content in texts.items():
        (folder / name).write_text(content)
    config = recipe(folder, f"data.files={json.dumps([str(folder / name) for name in texts])}")
    estimated, notes = corpus_facts_or_usual(config, WorkingFolder(folder))
    return corpus_facts(prepared_corpus(config, WorkingFolder(folder), SilentScreen())), estimated, notes[0]


PLAYS = files("plait").joinpath("examples", "shakespeare.txt").read_text(encoding="utf-8")


def prose(begin: int, characters: int) -> str:
    return PLAYS[begin : begin + characters]


def lines(count: int) -> list[str]:
    return [line.replace('"', "") for line in PLAYS.splitlines() if len(line) > 30][:count]


@pytest.mark.parametrize(
    ("texts", "within"),
    [
        ({"small.txt": prose(0, 300_000)}, 0.05),
        slow(({"large.txt": prose(0, 700_000), "other.md": prose(900_000, 100_000)}, 0.1)),
        slow(({"table.csv": "n,text\n" + "".join(f'{n},"{line}"\n' for n, line in enumerate(lines(14_000)))}, 0.1)),
        slow(({"rows.jsonl": "".join(json.dumps({"text": line, "x": 1}) + "\n" for line in lines(2000))}, 0.1)),
    ],
)
def test_text_that_is_here_is_estimated_close_to_what_preparing_finds(
    tmp_path: Path, texts: dict[str, str], within: float
) -> None:
    exact, estimated, sentence = prepared_and_estimated(tmp_path, texts)
    assert estimated.train_tokens == pytest.approx(exact.train_tokens, rel=within)
    assert estimated.documents == pytest.approx(exact.documents, rel=0.1)
    assert estimated.vocabulary == pytest.approx(exact.vocabulary, rel=0.01)
    assert sentence.startswith("text not prepared yet: about ") and sentence.endswith("; plait data makes this exact")


def test_chats_are_estimated_as_examples(tmp_path: Path) -> None:
    rows = "".join(f'"{line}?","{line}"\n' for line in lines(500))
    exact, estimated, _ = prepared_and_estimated(tmp_path, {"qa.csv": f"question,answer\n{rows}"})
    assert estimated.layout == exact.layout == "whole"
    assert estimated.documents == pytest.approx(exact.documents, rel=0.1)
    assert estimated.train_tokens == pytest.approx(exact.train_tokens, rel=0.15)


def test_an_estimate_says_what_it_leaves_out_and_serves_passes_over_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(prose(0, 10_000))
    (tmp_path / "old.txt").write_bytes("Füße ".encode("latin1") * 40)
    (tmp_path / "r.toml").write_text('[data]\nfiles = ["a.txt", "old.txt"]\n[model]\nsize = "1M"\n')
    config = load_recipe(tmp_path / "r.toml", ["train.budget=3 epochs"])
    facts, notes = corpus_facts_or_usual(config, WorkingFolder(tmp_path))
    assert 1000 < facts.train_tokens < 10_000 and "in 1 file, all of which was read" in notes[0]
    assert "old.txt, which is not UTF-8 text" in notes[1]


def test_a_file_that_is_torn_does_not_spoil_the_estimate(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(prose(0, 20_000))
    (tmp_path / "old.csv").write_bytes("text\nFüße\n".encode("latin1"))
    (tmp_path / "torn.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "r.toml").write_text('[data]\nfiles = ["a.txt", "old.csv", "torn.jsonl"]\n[model]\nsize = "1M"\n')
    facts, notes = corpus_facts_or_usual(load_recipe(tmp_path / "r.toml"), WorkingFolder(tmp_path))
    assert 5000 < facts.train_tokens < 20_000 and "old.csv, which is not UTF-8 text" in notes[1]


def test_text_that_is_here_and_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("stars,review\n1,Good.\n")
    (tmp_path / "empty.txt").touch()
    named = f"data.files={json.dumps([str(tmp_path / 'a.csv')])}"
    _, notes = corpus_facts_or_usual(recipe(tmp_path, named, "train.budget=20 steps"), WorkingFolder(tmp_path))
    assert 'a.csv has no column "text"; name one of stars, review' in notes[0] and notes[0].startswith("warning: ")
    with pytest.raises(PlaitError, match=r'a\.csv has no column "text"'):
        corpus_facts_or_usual(recipe(tmp_path, named, "train.budget=3 epochs"), WorkingFolder(tmp_path))
    named = f"data.files={json.dumps(str(tmp_path / 'empty.txt'))}"
    _, notes = corpus_facts_or_usual(recipe(tmp_path, named, "train.budget=20 steps"), WorkingFolder(tmp_path))
    assert not any(note.startswith("warning") for note in notes)
