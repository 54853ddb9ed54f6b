"""Facts about text that is not prepared: estimated where it is here, else usual ones, so that a plan needs no text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from plait.commands.preparing.base import base_facts, base_folder
from plait.commands.preparing.corpus import data_request, find_prepared_corpus, run_facts
from plait.data.preparation.estimate import estimate_text
from plait.data.shards import Corpus
from plait.data.sources import NotHereError
from plait.errors import PlaitError
from plait.model.requested_size import named_size
from plait.model.sizes import MODEL_SIZES
from plait.planner.derive.model_size import CorpusFacts, budget_of
from plait.recipe.schema import RunConfig
from plait.units import format_count
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

GPT2_VOCABULARY = 50257
USUAL_VOCABULARY = 32768
ASSUMED_CORPUS_TOKENS = 10**15
_LEFT_OUT_NAMED = 4
"""Files that a plan names; `plait data` names all."""


def corpus_facts_or_usual(config: RunConfig, working: WorkingFolder = CURRENT_FOLDER) -> tuple[CorpusFacts, list[str]]:
    """Facts about the recipe's text: exact ones if it is prepared, estimated ones if it is here, else usual ones; and
    sentences that say what is estimated or assumed, and why text that is here cannot be read. Raises PlaitError for a
    budget in passes over text that is not here or cannot be read."""
    corpus = corpus_if_prepared(config, working)
    if corpus:
        return run_facts(config, corpus, working), []
    unreadable = list[str]()
    try:
        return _estimated_facts(config, working)
    except (NotHereError, OSError):
        pass
    except PlaitError as error:
        if not _is_empty(config):
            if budget_of(config).unit == "epochs":
                raise
            unreadable = [f"warning: {error}"]
    if budget_of(config).unit == "epochs":
        raise PlaitError(
            f'train.budget = "{config.train.budget}" depends on the text, which is not here; bring it here, or give '
            "steps or tokens"
        )
    facts, notes = _usual_corpus_facts(config)
    base = base_facts(config, working)
    if base is not None:
        facts, notes = replace(facts, base=base, vocabulary=base.shape.vocabulary), []
    return facts, [*unreadable, *notes]


def _estimated_facts(config: RunConfig, working: WorkingFolder) -> tuple[CorpusFacts, list[str]]:
    """Facts by the sizes of the text's files and a sample of it; raises NotHereError where it is on other machines,
    and PlaitError where it cannot be read."""
    found = estimate_text(data_request(config, base_folder(config, working)))
    heldout, base = round(config.data.holdout * found.tokens), base_facts(config, working)
    train = max(1, round(found.tokens) - heldout)
    facts = CorpusFacts(
        folder="",
        content_hash="",
        vocabulary=found.vocabulary,
        train_tokens=train,
        longest_sequence=train,
        layout=found.layout,
        heldout_tokens=heldout,
        documents=max(1, round(found.documents)),
        base=base,
        added_tokens=found.added_entries if base and found.vocabulary > base.shape.vocabulary else 0,
    )
    tokens = f"about {format_count(train)} training tokens, vocabulary {facts.vocabulary}"
    estimated = f"text not prepared yet: {tokens}, estimated {found}; plait data makes this exact"
    return facts, [estimated, *(f"left out {fault}" for fault in found.left_out[:_LEFT_OUT_NAMED])]


def _is_empty(config: RunConfig) -> bool:
    """Whether the named files have no bytes: they stand for text on other machines."""
    files = [Path(source.path) for source in data_request(config).sources]
    return all(file.is_file() and file.stat().st_size == 0 for file in files)


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
