"""`plait data`: a recipe's text as tokens on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.commands.preparing.corpus import heldout_lines, learnt_facts, prepared_corpus
from plait.commands.preparing.shown_samples import packing_lines, shown_samples
from plait.recipe.load import load_recipe
from plait.screen.screen import Screen
from plait.working_folder import CURRENT_FOLDER


def prepare_text(recipe: Path, overrides: Sequence[str], *, show: int = 0, screen: Screen) -> None:
    """Prepare the text, or find it prepared, and print what there is; also `show` samples, with the tokens that are
    trained on marked. Raises PlaitError."""
    config = load_recipe(recipe, overrides)
    corpus = prepared_corpus(config, CURRENT_FOLDER, screen)
    screen.print(str(learnt_facts(config, corpus)))
    for line in heldout_lines(corpus):
        screen.print(line)
    screen.print(f"ready    {corpus.folder}")
    for line in packing_lines(config, corpus):
        screen.print(line)
    for pieces in shown_samples(corpus, show):
        screen.print_pieces(pieces)
