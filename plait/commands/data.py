"""`plait data`: a recipe's text as tokens on disk, and how well its documents divide among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.commands.preparing.balance_table import balance_report, check_balance_request
from plait.commands.preparing.corpus import heldout_lines, learnt_facts, prepared_corpus
from plait.commands.preparing.shown_samples import packing_lines, shown_samples
from plait.recipe.load import load_recipe
from plait.screen.screen import Screen
from plait.working_folder import CURRENT_FOLDER


def prepare_text(
    recipe: Path, overrides: Sequence[str], *, balance_ranks: int | None, show: int = 0, screen: Screen
) -> None:
    """Prepare the text, or find it prepared, and print what there is; for `balance_ranks` ranks, also how a step's
    documents divide among them, and so many samples with what of them is learnt. Raises PlaitError in one sentence."""
    config = load_recipe(recipe, overrides)
    if balance_ranks:
        check_balance_request(config, balance_ranks)
    corpus = prepared_corpus(config, CURRENT_FOLDER, screen)
    screen.print(str(learnt_facts(config, corpus)))
    for line in heldout_lines(corpus):
        screen.print(line)
    screen.print(f"ready    {corpus.folder}")
    for line in packing_lines(config, corpus):
        screen.print(line)
    for pieces in shown_samples(corpus, show):
        screen.print_pieces(pieces)
    if balance_ranks:
        screen.print(balance_report(config, corpus, balance_ranks).table())
