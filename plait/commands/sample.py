"""`plait sample`: a trained model goes on with a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from plait.checkpoint.store import FoundCheckpoint, newest_good
from plait.cluster.requested_workers import RequestedDevices
from plait.commands.planning.run_folder import RunFolder, find_run
from plait.data.index import damaged
from plait.data.preparation.tokens import Tokenizer, corpus_tokenizer
from plait.data.shards import Corpus, open_corpus
from plait.errors import PlaitError, check_utf8
from plait.model.gpt import GPT
from plait.planner.plan import Plan
from plait.report.metrics import read_metrics
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
    check_utf8(prompt)
    folder = find_run(run, working)
    model, _ = load_model(folder)
    tokenizer = corpus_tokenizer(corpus_of_run(folder.saved_plan(), working))
    ids = [tokenizer.eot, *tokenizer.encode(prompt)]
    new = generate(
        model, ids, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed, stop=frozenset({tokenizer.eot})
    )
    return chain([prompt], decode_incrementally(tokenizer, ids[1:], new))


def corpus_of_run(plan: Plan, working: WorkingFolder) -> Corpus:
    """The prepared data that a run was trained on; raises PlaitError where other data lie in their place."""
    corpus = open_corpus(working.path / plan.corpus)
    if corpus.content_hash != plan.corpus_hash:
        raise damaged(corpus.folder, "they are not those that this run was trained on")
    return corpus


def load_model(folder: RunFolder) -> tuple[GPT, FoundCheckpoint]:
    """The run's model with the weights of its newest checkpoint that verifies, on the first GPU that the run may use,
    else on the processor."""
    found = newest_good(folder.checkpoints)
    if found is None:
        raise PlaitError(f'"{folder.path}" {_why_no_checkpoint(folder)}')
    device = device_to_sample_on(folder.saved_config().run.devices, torch.cuda.device_count())
    model = GPT(folder.saved_plan().shape)
    load_weights(model, found.path, found.manifest)
    return model.to(device).eval(), found


def _why_no_checkpoint(folder: RunFolder) -> str:
    steps, _ = read_metrics(folder.metrics)
    if steps and not steps[-1].is_finite:
        return "diverged before its first checkpoint; train again with a lower optimizer.lr and another run.name"
    return "has no checkpoint yet; train it for a while first"


def device_to_sample_on(requested: RequestedDevices, present: int) -> torch.device:
    """The first of a run's devices; where the run was brought to another machine, that one's first GPU, or its
    processor."""
    if requested == "cpu" or not present:
        return torch.device("cpu")
    first = 0 if requested == "auto" else requested[0]
    return torch.device("cuda", first if first < present else 0)


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
