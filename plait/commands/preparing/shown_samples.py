"""`plait data --show`: samples as a person reads them, and what of them is learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

import numpy as np

from plait.commands.preparing.corpus import corpus_facts, overlong_lines
from plait.data.preparation.tokens import Tokenizer, corpus_tokenizer
from plait.data.samples.sizes import corpus_sizes
from plait.data.shards import Corpus, Shard
from plait.recipe.schema import RunConfig
from plait.screen.screen import TextPiece
from plait.units import counted

MOST_TOKENS_SHOWN = 512
USUAL_WINDOW = 1024
"""Tokens of the windows whose fullness is shown where the recipe leaves their length open."""


def packing_lines(config: RunConfig, corpus: Corpus) -> list[str]:
    """How full windows of whole examples are, and what becomes of those that do not fit; nothing for a stream."""
    if corpus.layout == "stream":
        return []
    sizes, named = corpus_sizes(corpus), config.train.sequence
    sequence = max(USUAL_WINDOW, sizes.longest_example) if named == "auto" else named
    packed = sizes.packed(sequence, config.data.overlong)
    learned = sum(int((shard.mask == 0).sum()) for shard in corpus.train if shard.mask is not None)
    asked = "" if named != "auto" else " (the plan chooses their length: plait plan)"
    lines = [
        f"learned  {learned / corpus.train_tokens:.1%} of the tokens; the others are only read",
        f"packing  {packed.windows:,} windows of {sequence} tokens, {packed.share:.1%} full{asked}; "
        f"the longest {sizes.unit} has {counted(sizes.longest_example, 'token', ',')}",
    ]
    lines += overlong_lines(corpus_facts(corpus), sequence, config.data.overlong)
    return lines


def shown_samples(corpus: Corpus, count: int) -> Iterator[Sequence[TextPiece]]:
    """This many training examples, or pairs of them, evenly chosen from all, each as pieces of text of which the
    learned ones stand out."""
    if not count:
        return
    tokenizer = corpus_tokenizer(corpus)
    names = ("chosen", "rejected") if corpus.layout == "pairs" else ("example",)
    ends = list(accumulate(len(shard.starts) // len(names) for shard in corpus.train))
    total = ends[-1]
    count = min(count, total)
    yield [("what stands out so is learned from: ", "plain"), ("like this", "emphasized")]
    for turn in range(count):
        place = turn * total // count
        number = int(np.searchsorted(ends, place, side="right"))
        shard = corpus.train[number]
        first = place * len(names) - (ends[number] * len(names) - len(shard.starts))
        for which, name in enumerate(names):
            title = f"{name:<8} {'of pair ' if len(names) > 1 else ''}{place + 1} of {total}"
            yield from _shown(corpus, tokenizer, shard, first + which, title)


def _shown(
    corpus: Corpus, tokenizer: Tokenizer, shard: Shard, number: int, title: str
) -> Iterator[Sequence[TextPiece]]:
    bounds = np.append(shard.starts, len(shard.tokens) - 1)
    first, last = int(bounds[number]), int(bounds[number + 1])
    if corpus.layout == "stream" and (not corpus.bos or number == len(shard.starts) - 1):
        last += 1  # the end of text after a document is learned as well
    stop = min(last, first + MOST_TOKENS_SHOWN)
    ids = shard.tokens[first:stop].tolist()
    marks = shard.mask_rows(np.array([first]), stop - first)[0].astype(bool)
    marks[0] = True  # nothing stands before it
    learned = int((~marks).sum()) if stop == last else None
    about = f", {learned} of them learned" if learned is not None else f", the first {stop - first} of them"
    yield [(f"{title}: {counted(last - first, 'token', ',')}{about}", "plain")]
    pieces, done, shown = list[TextPiece](), 0, 0
    for mark, run in groupby(marks.tolist()):
        done += len(list(run))
        # Decoded by itself, a run would lose a space that it begins with.
        text = tokenizer.decode(ids[:done])
        pieces.append((_printable(text[shown:]), "plain" if mark else "emphasized"))
        shown = len(text.rstrip("\ufffd"))  # a character of several tokens is shown with the last of them
    yield [*pieces, ("" if stop == last else " …", "plain")]


def _printable(text: str) -> str:
    """Without characters that would move a terminal's cursor or change its colours."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
