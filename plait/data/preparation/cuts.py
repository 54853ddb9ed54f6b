"""Splits text before a tokenizer reads it: long documents into pieces, and text without spaces into parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

MIN_PIECE_CHARACTERS = 1 << 14
LONGEST_PIECE = 1 << 17
LONGEST_RUN = 1 << 12
"""Most characters without a space, or of nothing but space, that a tokenizer is given at once."""

# Note [cuts keep the tokens]: long documents are tokenized in pieces, and a piece boundary must be one that the
# pre-tokenizer would draw anyway. A space between two non-spaces opens a new word in every byte-level scheme. A newline
# before a non-space stands alone in GPT-2's pattern, so the cut may fall before it; the patterns of Llama 3 and Qwen
# glue newlines to what precedes them, so there the cut falls behind. Tokenizers that give a text a prefix are cut only
# where `prefix_cut` finds that no token can lie, and the piece behind is encoded behind the character before it.
_SPACE_CUT = re.compile(r"(?<=\S)(?= \S)")
_LETTER_SPACE_CUT = re.compile(r"(?<=[^\W_])(?= [^\W_])")
_NO_CUT = re.compile(r"(?!)")
GPT2_CUT = re.compile(r"(?=\n\S)|(?<=\S)(?= \S)")
OTHER_CUT = re.compile(r"(?<=\n)(?=\S)|(?<=\S)(?= \S)")

# Note [long runs are split]: learning and applying merges takes time that grows with the square of a word's length, and
# DNA or one repeated letter is a single word of megabytes. So runs without a space are split after LONGEST_RUN
# characters at most: where a letter or digit meets punctuation, which ends a word in every byte-level scheme (code,
# Chinese), else anywhere. Tokenizer.encode_pieces and train_bpe do it, so all text is split at the same places.
# Tokenizers that give a text a prefix encode long runs whole: their words end at spaces alone, and a run of a megabyte
# takes them less than a second.
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


def adds_text_prefix(definition: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json encodes the beginning of a text in another way than text that goes on: it puts "▁" or a
    space before it, or strips one."""
    steps = [*_steps(definition.get("normalizer")), *_steps(definition.get("pre_tokenizer"))]
    return any(
        step["type"] == "Prepend"
        or step.get("add_prefix_space") is True
        or step.get("prepend_scheme") in ("always", "first")
        or (step["type"] == "Strip" and step.get("strip_left"))
        for step in steps
    )


def prefix_cut(definition: Mapping[str, Any]) -> re.Pattern[str]:
    """Positions at which the tokenizer of a tokenizer.json that `adds_text_prefix` never has one token on both
    sides."""
    normalizer, splitter = _steps(definition.get("normalizer")), _steps(definition.get("pre_tokenizer"))
    if any(step["type"] == "ByteLevel" for step in splitter):
        return _SPACE_CUT
    model = definition["model"]
    vocabulary = model["vocab"] if isinstance(model["vocab"], dict) else [entry[0] for entry in model["vocab"]]
    added = [token["content"] for token in definition.get("added_tokens", ()) if not token.get("special")]
    tokens = [*vocabulary, *added]
    spaces = {" ", "▁", *(step["replacement"] for step in splitter if "replacement" in step)}
    followed = {sign for token in tokens for sign in token[:-1]}
    before_space = {one for token in tokens for one, other in pairwise(token) if other in spaces and one not in spaces}
    before_space |= {token["content"][-1] for token in definition.get("added_tokens", ()) if token.get("rstrip")}
    is_plain = all(step["type"] == "Metaspace" for step in splitter) and all(
        step["type"] == "Prepend" or (step["type"], step.get("pattern")) == ("Replace", {"String": " "})
        for step in normalizer
    )
    if not is_plain:  # the characters of the text may not be those that the vocabulary is made of
        return _NO_CUT if before_space else _LETTER_SPACE_CUT
    last = {token for token in tokens if len(token) == 1 and token not in followed and not token.isspace()} - spaces
    if model.get("byte_fallback") and not any("\n" in token for token in tokens):
        last.add("\n")
    behind_last = f"|(?<=[{_class(last)}])(?=\\S)" if last else ""
    return re.compile(rf"(?<=[^\s{_class(before_space)}])(?= \S){behind_last}")


def _steps(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The single steps of a normalizer or a pre-tokenizer."""
    if part is None:
        return []
    inner = part.get("normalizers", part.get("pretokenizers"))
    return [part] if inner is None else [step for one in inner for step in _steps(one)]


def _class(signs: Iterable[str]) -> str:
    return "".join(re.escape(sign) for sign in sorted(signs))


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
    """The positions at which overlong runs of a text are split."""
    for run in _RUN.finditer(text):
        start, stop = run.span()
        while stop - start > LONGEST_RUN:
            start = _last_word_end(text, start + LONGEST_RUN)
            yield start


def _last_word_end(text: str, limit: int) -> int:
    """The last end of a word up to `limit`, or that itself where there is none shortly before it."""
    ends = (end.start() for end in _WORD_END.finditer(text, limit - LONGEST_RUN // 2, limit + 2))
    return max((end for end in ends if end <= limit), default=limit)
