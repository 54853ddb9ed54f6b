"""`plait sample`: a trained model goes on with a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain, takewhile
from typing import Any

from plait.commands.models.opened_model import OpenedModel, end_tokens, open_each, open_model
from plait.data.preparation.tokens import Tokenizer
from plait.errors import check_utf8
from plait.trainer.generate import generate
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

DECODE_CONTEXT_TOKENS = 8
"""Number of preceding tokens that are decoded with a piece of text, as they decide how it is written."""


class SampledText(Iterator[str]):
    """A text whose pieces come as a model finds them; `str()` waits for the rest, and is the whole text from its
    beginning on, as `plait sample` prints it."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces, self._so_far = pieces, list[str]()

    def __next__(self) -> str:
        piece = next(self._pieces)
        self._so_far.append(piece)
        return piece

    def __str__(self) -> str:
        for _ in self:
            pass
        return "".join(self._so_far)

    def _repr_html_(self) -> str:
        """The samples as a notebook shows them."""
        return f"<pre>{escape(str(self))}</pre>"


def sample(
    run: str,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    adapter: str | None = None,
    working: WorkingFolder = CURRENT_FOLDER,
) -> SampledText:
    """The prompt and then the model's words, piece by piece as they come; the same seed gives the same text. `run` is a
    run or a model's folder, `adapter` as in find_model.

    Raises PlaitError before the first piece where there is no model.
    """
    check_utf8(prompt)
    opened = open_model(run, working, adapter=adapter)
    return _continued(opened, prompt, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)


def sample_each(
    run: str, adapters: Sequence[str], prompt: str, *, working: WorkingFolder = CURRENT_FOLDER, **how: Any
) -> Iterator[tuple[str, SampledText]]:
    """The name of each adapter and the text that the model writes with it; `how` as `sample` takes it."""
    check_utf8(prompt)
    for name, opened in zip(adapters, open_each(run, adapters, working), strict=True):
        yield name, _continued(opened, prompt, **how)


def _continued(
    opened: OpenedModel, prompt: str, *, tokens: int, temperature: float, top_p: float, seed: int
) -> SampledText:
    tokenizer, ends = opened.tokenizer, end_tokens(opened)
    ids = tokenizer.encode(prompt)
    new = generate(
        opened.model,
        [*tokenizer.beginning, *ids],
        tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=ends,
    )
    text = takewhile(lambda token: token not in ends, new)
    return SampledText(chain([prompt], decode_incrementally(tokenizer, ids, text)))


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
