"""What a plan takes for granted of text that nobody has prepared: a plan on paper needs none."""

from __future__ import annotations

from plait.commands.preparing.corpus import corpus_facts, find_prepared_corpus
from plait.errors import PlaitError
from plait.model.sizes import MODEL_SIZES
from plait.planner.derive.model_size import CorpusFacts
from plait.recipe.schema import RunConfig

GPT2_VOCABULARY = 50257
USUAL_VOCABULARY = 32768
ASSUMED_CORPUS_TOKENS = 10**15


def corpus_facts_or_usual(config: RunConfig) -> tuple[CorpusFacts, list[str]]:
    """The recipe's text where it was prepared before, else what is usual; and what was assumed, in words."""
    try:
        corpus = find_prepared_corpus(config)
    except PlaitError:  # it lies on the machines that are planned for
        corpus = None
    return (corpus_facts(corpus), []) if corpus else _usual_corpus_facts(config)


def _usual_corpus_facts(config: RunConfig) -> tuple[CorpusFacts, list[str]]:
    """Text enough, and the vocabulary that the recipe or the size usually has."""
    size, named, notes = config.model.size, config.model.vocabulary, list[str]()
    if named != "auto":
        vocabulary = named
    elif config.data.tokenizer == "gpt2":
        vocabulary = GPT2_VOCABULARY
    else:
        vocabulary = MODEL_SIZES[size].vocabulary if size in MODEL_SIZES else USUAL_VOCABULARY
        notes.append(f"vocabulary {vocabulary}: usual for this size; the text was not looked at")
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
