"""Examples as token ids, each with a mark at the tokens that are not learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Protocol

import numpy as np
import tokenizers

from plait.data.conversations.chat_template import ChatTemplate, MarkedText
from plait.data.conversations.examples import ChatExample, Example, PromptExample
from plait.data.conversations.message_keys import texts_in
from plait.errors import PlaitError

Encoded = list[list[int]]


class DefinesTokens(Protocol):
    """The parts of a tokenizer that encoding examples needs."""

    @property
    def definition(self) -> str: ...
    @property
    def eot(self) -> int: ...
    @property
    def beginning(self) -> tuple[int, ...]: ...
    @property
    def adds_prefix(self) -> bool: ...
    def encode_pieces(self, pieces: Sequence[str]) -> Encoded: ...
    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedExample:
    """An example's tokens up to the last that is learned: what follows it can teach nothing. `mask` is 1 at tokens that
    are never a target, the first one always."""

    ids: np.ndarray[Any, Any]
    mask: np.ndarray[Any, Any]
    learned_bytes: int
    """Bytes of the text that is learned."""
    is_chat: bool = False
    remarks: tuple[str, ...] = ()
    """Remarks on how a chat was made: as in MarkedText."""
    straddles: bool = False
    """Whether a token holds the end of the prompt and the beginning of what is learned."""


class ExampleEncoder:
    """Encodes many examples at once, on all cores."""

    def __init__(self, tokenizer: DefinesTokens, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        # In a template's text "<|im_end|>" is the token; in a document, as for `tokenizer`, it is ordinary text.
        self._backend: Any = tokenizers.Tokenizer.from_str(tokenizer.definition)
        self._backend.no_truncation()
        self._backend.no_padding()
        if getattr(self._backend.model, "dropout", None):
            self._backend.model.dropout = None
        added = self._backend.get_added_tokens_decoder().values()
        self._special = [token.content for token in added if token.special]

    def encode(self, examples: Sequence[Example]) -> list[EncodedExample]:
        """The examples' tokens; raises PlaitError naming the first one that cannot be learned."""
        found = self.encode_each(examples)
        for one in found:
            if isinstance(one, PlaitError):
                raise one
        return [one for one in found if not isinstance(one, PlaitError)]

    def encode_each(self, examples: Sequence[Example]) -> list[EncodedExample | PlaitError]:
        """The tokens of each example, or why it cannot be learned."""
        chats = [example for example in examples if isinstance(example, ChatExample)]
        encoded = iter(self._encode_chats(chats))
        others = iter(self._tokenizer.encode_pieces([text for one in examples for text in self._plain_texts(one)]))
        found = list[EncodedExample | PlaitError]()
        for example in examples:
            if isinstance(example, ChatExample):
                found.append(next(encoded))
            else:
                found.append(self._with_ends([next(others) for _ in example.texts], example))
        return found

    def _encode_chats(self, chats: Sequence[ChatExample]) -> Iterator[EncodedExample | PlaitError]:
        refused = [self._special_token_in(one) for one in chats]
        kept = [one for one, why in zip(chats, refused, strict=True) if why is None]
        rendered = iter(self._template.learned(kept, self._special))
        found = [why or next(rendered) for why in refused]
        marked = [one for one in found if not isinstance(one, PlaitError)]
        parts = [_parts(one) for one in marked]
        wholes = self._ids([one.text for one in marked])
        apart = iter(self._ids([text for one in parts for text, _ in one]))
        rows = iter(zip(parts, wholes, strict=True))
        for example, one in zip(chats, found, strict=True):
            if isinstance(one, PlaitError):
                yield one
                continue
            own, whole = next(rows)
            pieces = [next(apart) for _ in own]
            if list(chain.from_iterable(pieces)) != whole:
                pieces = self._cut_at_prefixes(own, whole) or pieces
            nbytes = sum(len(one.text[start:stop].encode("utf-8")) for start, stop in one.learned)
            encoded = _example(pieces, [kind == "learned" for _, kind in own], nbytes)
            if encoded.mask.all():
                yield PlaitError(f"{example.place} leaves no token to learn; correct or remove that conversation")
            else:
                yield replace(encoded, is_chat=True, remarks=one.remarks)

    def _cut_at_prefixes(self, parts: Sequence[tuple[str, str]], whole: list[int]) -> Encoded | None:
        """The whole text's tokens, divided where the tokens of each longer prefix end; None where one of them is not
        how the whole begins, so a token would lie on both sides of an edge."""
        texts = ["".join(text for text, _ in parts[: count + 1]) for count in range(len(parts) - 1)]
        prefixes = [*self._ids(texts), whole]
        if any(whole[: len(prefix)] != prefix for prefix in prefixes):
            return None
        return [whole[first:last] for first, last in pairwise([0, *map(len, prefixes)])]

    def _ids(self, texts: Sequence[str]) -> Encoded:
        return [found.ids for found in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _special_token_in(self, example: ChatExample) -> PlaitError | None:
        """The refusal of a chat whose text holds a special token: as text it would be read as the token itself."""
        texts = [(f"message {n}", text) for n, one in enumerate(example.messages, 1) for text in one.every_text]
        texts += [("tools", text) for text in texts_in(example.tools)]
        for what, text in texts:
            for token in self._special:
                if token in text:
                    return PlaitError(
                        f'{example.place}, {what} holds "{token}", which has a meaning of its own; take it out'
                    )
        return None

    def _with_ends(self, texts: Encoded, example: Example) -> EncodedExample:
        """Tokens between the beginning and the end of a text; of a prompt with its completion only that is learned.

        Where the tokenizer adds a prefix, the last of `texts` is the whole text, divided after as many tokens as the
        prompt alone has, as TRL does it. If these are others than the whole begins with, a token straddles the
        boundary.
        """
        *known, last = texts
        straddles = False
        if known and self._tokenizer.adds_prefix:
            straddles = last[: len(known[0])] != known[0]
            edge = min(len(known[0]), len(last) - 1)
            known, last = [last[:edge]], last[edge:]
        nbytes = len(example.texts[-1].encode("utf-8"))
        pieces = [[*self._tokenizer.beginning], *known, last, [self._tokenizer.eot]]
        return replace(_example(pieces, [False, *[False] * len(known), True, True], nbytes), straddles=straddles)

    def _plain_texts(self, example: Example) -> tuple[str, ...]:
        """The texts to encode: of a prompt with its completion both together where the completion alone would be given
        a prefix that is not in the file."""
        if isinstance(example, PromptExample) and self._tokenizer.adds_prefix:
            return example.prompt, example.prompt + example.completion
        return () if isinstance(example, ChatExample) else example.texts


def _parts(marked: MarkedText) -> list[tuple[str, str]]:
    """A text divided at the edges of what is learned; none of the parts is empty."""
    parts, done = list[tuple[str, str]](), 0
    for start, stop in marked.learned:
        parts += [(marked.text[done:start], "read"), (marked.text[start:stop], "learned")]
        done = stop
    parts.append((marked.text[done:], "read"))
    return [part for part in parts if part[0]]


def _example(pieces: Encoded, learned: Sequence[bool], nbytes: int) -> EncodedExample:
    ids = np.array(list(chain.from_iterable(pieces)), dtype=np.uint32)
    mask = np.repeat(np.array([not each for each in learned], dtype=np.uint8), [len(piece) for piece in pieces])
    mask[:1] = 1  # nothing stands before it
    last = int(np.flatnonzero(mask == 0).max(initial=0))
    return EncodedExample(ids=ids[: last + 1], mask=mask[: last + 1], learned_bytes=nbytes)
