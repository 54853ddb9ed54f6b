"""A plan on paper assumes usual facts about text that is not prepared; passes over it cannot be assumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.commands.preparing.usual_corpus import corpus_facts_or_usual
from plait.errors import PlaitError
from plait.working_folder import WorkingFolder
from tests.planner.machines import recipe


def test_a_budget_in_epochs_needs_the_text(tmp_path: Path) -> None:
    working = WorkingFolder(tmp_path)
    facts, notes = corpus_facts_or_usual(recipe(tmp_path, "model.size=1M", "train.budget=20 steps"), working)
    assert facts.train_tokens > 10**12 and notes
    with pytest.raises(PlaitError, match=r'train\.budget = "3 epochs" depends on the text, .*; run plait data first'):
        corpus_facts_or_usual(recipe(tmp_path, "model.size=1M", "train.budget=3 epochs"), working)
