"""`plait sample`: a trained model goes on with a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from plait.checkpoint.store import FoundCheckpoint, newest_good
from plait.commands.planning.run_folder import RunFolder, find_run
from plait.data.preparation.tokens import Tokenizer, corpus_tokenizer
from plait.data.shards import open_corpus
from plait.errors import PlaitError
from plait.model.gpt import GPT
from plait.trainer.generate import generate
from plait.trainer.persist import load_weights
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

DECODE_CONTEXT_TOKENS = 8
"""Number of preceding tokens that are decoded with a piece of text, as they decide how it is written."""


def sample(
    run: str,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    working: WorkingFolder = CURRENT_FOLDER,
) -> Iterator[str]:
    """The prompt and then the model's words, piece by piece as they come; the same seed gives the same text.

    Raises PlaitError before the first piece where the run has no model.
    """
    folder = find_run(run, working)
    model, _ = load_model(folder)
    tokenizer = corpus_tokenizer(open_corpus(working.path / folder.saved_plan().corpus))
    ids = [tokenizer.eot, *tokenizer.encode(prompt)]
    new = generate(
        model, ids, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed, stop=frozenset({tokenizer.eot})
    )
    return chain([prompt], decode_incrementally(tokenizer, ids[1:], new))


def load_model(folder: RunFolder) -> tuple[GPT, FoundCheckpoint]:
    """The run's model with the weights of its newest checkpoint that verifies, on the CPU or the first GPU."""
    found = newest_good(folder.checkpoints)
    if found is None:
        raise PlaitError(f'"{folder.path}" has no checkpoint yet; train it for a while first')
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(folder.saved_plan().shape)
    load_weights(model, found.path, found.manifest)
    return model.to(device).eval(), found


def decode_incrementally(tokenizer: Tokenizer, prompt_ids: Sequence[int], new_ids: Iterator[int]) -> Iterator[str]:
    """Pieces of text as soon as they are complete: a character of several bytes can be spread over several tokens.

    Some tokenizers drop the space that a text begins with, so each piece is what its tokens add to the text before
    them.
    """
    known, waiting = list(prompt_ids[-DECODE_CONTEXT_TOKENS:]), list[int]()
    for token in new_ids:
        if token == tokenizer.eot:
            break
        waiting.append(token)
        text = _decode_suffix(tokenizer, known, waiting)
        if not text.endswith("\ufffd"):
            yield text
            known, waiting = [*known, *waiting][-DECODE_CONTEXT_TOKENS:], []
    if waiting:
        yield _decode_suffix(tokenizer, known, waiting)


def _decode_suffix(tokenizer: Tokenizer, known: list[int], waiting: list[int]) -> str:
    return tokenizer.decode([*known, *waiting])[len(tokenizer.decode(known)) :]
