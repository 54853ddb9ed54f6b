"""Usual facts about text that is not prepared, so that a plan on paper needs no text."""

from __future__ import annotations

from dataclasses import replace

from plait.commands.preparing.base import base_facts
from plait.commands.preparing.corpus import find_prepared_corpus, run_facts
from plait.data.shards import Corpus
from plait.errors import PlaitError
from plait.model.requested_size import named_size
from plait.model.sizes import MODEL_SIZES
from plait.planner.derive.model_size import CorpusFacts, budget_of
from plait.recipe.schema import RunConfig
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

GPT2_VOCABULARY = 50257
USUAL_VOCABULARY = 32768
ASSUMED_CORPUS_TOKENS = 10**15


def corpus_facts_or_usual(config: RunConfig, working: WorkingFolder = CURRENT_FOLDER) -> tuple[CorpusFacts, list[str]]:
    """Facts about the recipe's text if it is prepared, else usual ones; and sentences that say what is assumed. Raises
    PlaitError for a budget in passes over text that was not looked at."""
    corpus = corpus_if_prepared(config, working)
    if corpus:
        return run_facts(config, corpus, working), []
    if budget_of(config).unit == "epochs":
        raise PlaitError(
            f'train.budget = "{config.train.budget}" depends on the text, which is not prepared here; run plait data '
            "first, or give steps or tokens"
        )
    facts, notes = _usual_corpus_facts(config)
    base = base_facts(config, working)
    return (facts, notes) if base is None else (replace(facts, base=base, vocabulary=base.shape.vocabulary), [])


def corpus_if_prepared(config: RunConfig, working: WorkingFolder) -> Corpus | None:
    """The recipe's prepared text; None also where its files are not here but on the machines that are planned for."""
    try:
        return find_prepared_corpus(config, working)
    except PlaitError:
        return None


def _usual_corpus_facts(config: RunConfig) -> tuple[CorpusFacts, list[str]]:
    """Enough text for any budget, and the vocabulary that the recipe names or that is usual for the size."""
    size, named, notes = config.model.size, config.model.vocabulary, list[str]()
    if named != "auto":
        vocabulary = named
    elif config.data.tokenizer == "gpt2":
        vocabulary = GPT2_VOCABULARY
    else:
        name = "" if size == "auto" else named_size(size)
        vocabulary = MODEL_SIZES[name].vocabulary if name else USUAL_VOCABULARY
        notes.append(
            f"vocabulary {vocabulary}: usual for this size; the text was not looked at (plait data prepares it)"
        )
    facts = CorpusFacts(
        folder="",
        content_hash="",
        vocabulary=vocabulary,
        train_tokens=ASSUMED_CORPUS_TOKENS,
        longest_sequence=ASSUMED_CORPUS_TOKENS,
        heldout_tokens=0,
        documents=1,
    )
    return facts, notes
