"""Where text is divided before a tokenizer reads it: long documents into pieces, and text without spaces into parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

MIN_PIECE_CHARACTERS = 1 << 14
LONGEST_PIECE = 1 << 17
LONGEST_RUN = 1 << 12
"""Most characters without a space, or of nothing but space, that a tokenizer is given at once."""

# Note [cuts keep the tokens]: long documents are tokenized in pieces, and a piece boundary must be one that the
# pre-tokenizer would draw anyway. A space between two non-spaces opens a new word in every byte-level scheme. A newline
# before a non-space stands alone in GPT-2's pattern, so the cut may fall before it; the patterns of Llama 3 and Qwen
# glue newlines to what precedes them, so there the cut falls behind. Other tokenizers (SentencePiece) may give other
# tokens at a cut, at most one cut each PIECE_CHARACTERS.
GPT2_CUT = re.compile(r"(?=\n\S)|(?<=\S)(?= \S)")
OTHER_CUT = re.compile(r"(?<=\n)(?=\S)|(?<=\S)(?= \S)")

# Note [long runs are split]: learning and applying merges takes time that grows with the square of a word's length, and
# DNA or one repeated letter is a single word of megabytes. So runs without a space are split after LONGEST_RUN
# characters at most: where a letter or digit meets punctuation, which ends a word in every byte-level scheme (code,
# Chinese), else anywhere. Tokenizer.encode_pieces and train_bpe do it, so all text is split at the same places.
_RUN = re.compile(r"\S+|\s+")
_HALF_RUN = re.compile(rf"\S{{{LONGEST_RUN // 2}}}|\s{{{LONGEST_RUN // 2}}}")
_WORD_END = re.compile(r"(?<=[^\W_])(?=[^\w\s]|_)|(?<=\S)(?=[^\S\r\n]\S)")


def cut_into_pieces(blocks: Iterable[str], cut: re.Pattern[str]) -> Iterator[str]:
    """Cut one document into pieces that tokenize as the whole would; see Note [cuts keep the tokens]."""
    waiting = ""
    for block in blocks:
        waiting += block
        start = 0
        while end := _next_cut(waiting, start, cut):
            yield waiting[start:end]
            start = end
        waiting = waiting[start:]
    if waiting:
        yield waiting


def split_long_runs(text: str) -> list[str]:
    """The text in parts, of which none has more than LONGEST_RUN characters without a change between space and
    non-space."""
    # A long run covers the half run that begins at some multiple of its length; ordinary text fails these few looks.
    if not any(_HALF_RUN.match(text, at) for at in range(0, len(text), LONGEST_RUN // 2)):
        return [text]
    edges = [0, *_run_cuts(text), len(text)]
    return [text[start:stop] for start, stop in pairwise(edges)]


def _next_cut(text: str, start: int, cut: re.Pattern[str]) -> int | None:
    found = cut.search(text, start + MIN_PIECE_CHARACTERS, start + LONGEST_PIECE)
    if found:
        return found.start()
    if len(text) - start <= LONGEST_PIECE:
        return None
    *_, last = 0, *_run_cuts(text[start : start + LONGEST_PIECE + 1])
    return start + last if last else _last_word_end(text, start + LONGEST_PIECE)


def _run_cuts(text: str) -> Iterator[int]:
    """Where the runs of a text are split that are too long."""
    for run in _RUN.finditer(text):
        start, stop = run.span()
        while stop - start > LONGEST_RUN:
            start = _last_word_end(text, start + LONGEST_RUN)
            yield start


def _last_word_end(text: str, limit: int) -> int:
    """The last end of a word up to `limit`, or that itself where there is none shortly before it."""
    ends = (end.start() for end in _WORD_END.finditer(text, limit - LONGEST_RUN // 2, limit + 2))
    return max((end for end in ends if end <= limit), default=limit)
