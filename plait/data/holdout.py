"""Decides which text is held out for evaluation: a function of the text alone, never of file order or names."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from plait.data.documents import Document
from plait.errors import PlaitError

HoldoutSplit = Literal["train", "heldout"]
HoldoutRule = Literal["none", "documents", "tails"]

FEWEST_DOCUMENTS = 20
"""With fewer documents, holding out whole ones would be too coarse; the tail of each is held out instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteSpan:
    """A byte range of a document, and the split that it belongs to."""

    split: HoldoutSplit
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSurvey:
    """Counts from a first pass over documents; `held_documents` is the number that a hold-out of whole documents
    would take."""

    documents: int = 0
    text_bytes: int = 0
    held_documents: int = 0

    def __add__(self, other: DocumentSurvey) -> DocumentSurvey:
        return DocumentSurvey(
            documents=self.documents + other.documents,
            text_bytes=self.text_bytes + other.text_bytes,
            held_documents=self.held_documents + other.held_documents,
        )


def survey_documents(documents: Iterable[Document], fraction: float) -> Iterator[DocumentSurvey]:
    """Read documents once and yield a DocumentSurvey of each; raises PlaitError on binary or non-UTF-8 text."""
    for document in documents:
        held = hash_fraction(_checked(document)) < fraction
        yield DocumentSurvey(documents=1, text_bytes=document.text_bytes, held_documents=int(held))


def choose_holdout_rule(found: DocumentSurvey, fraction: float) -> HoldoutRule:
    """Choose "documents" where there are enough of them for both splits, else "tails"; "none" for a fraction of 0."""
    if fraction == 0:
        return "none"
    both_sides = 0 < found.held_documents < found.documents
    return "documents" if found.documents >= FEWEST_DOCUMENTS and both_sides else "tails"


def holdout_spans(document: Document, rule: HoldoutRule, fraction: float) -> tuple[ByteSpan, ...]:
    """The spans into which a document is divided; every byte of it lies in exactly one."""
    end = document.text_bytes
    if rule == "none":
        return (ByteSpan(split="train", start=0, stop=end),)
    if rule == "documents":
        held = hash_fraction(document.read()) < fraction
        return (ByteSpan(split="heldout" if held else "train", start=0, stop=end),)
    cut = _character_start(document, end - int(end * fraction))
    both = (ByteSpan(split="train", start=0, stop=cut), ByteSpan(split="heldout", start=cut, stop=end))
    return tuple(span for span in both if span.stop > span.start)


def text_blocks(blocks: Iterable[bytes]) -> Iterator[str]:
    """Decode UTF-8 blocks whose edges may split a character."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    for block in blocks:
        yield decode(block)
    yield decode(b"", final=True)


def hash_fraction(blocks: Iterable[bytes]) -> float:
    """The text's hash as a number from 0 to 1. Equal texts have equal hashes, so duplicates are in one split."""
    state = blake2b(digest_size=8)
    for block in blocks:
        state.update(block)
    return int.from_bytes(state.digest(), "little") / 2**64


def _character_start(document: Document, at: int) -> int:
    """The offset of the first UTF-8 character that starts at or after `at` (continuation bytes are 10xxxxxx)."""
    head = b"".join(document.read(at, min(at + 4, document.text_bytes)))
    return at + next((i for i, byte in enumerate(head) if byte & 0xC0 != 0x80), len(head))


def _checked(document: Document) -> Iterator[bytes]:
    if isinstance(document.content, bytes):  # came out of a decoder already
        yield from document.read()
        return
    decoder, offset = codecs.getincrementaldecoder("utf-8")(), document.begin
    for block in document.read():
        if b"\0" in block:
            raise _not_text(document, "binary: it has a NUL byte", offset + block.index(b"\0"))
        _decode_at(decoder, document, block, offset)
        offset += len(block)
        yield block
    _decode_at(decoder, document, b"", offset)


def _decode_at(decoder: codecs.IncrementalDecoder, document: Document, block: bytes, offset: int) -> None:
    waiting = len(decoder.getstate()[0])
    try:
        decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise _not_text(document, "not UTF-8 text", offset - waiting + error.start) from None


def _not_text(document: Document, what: str, byte: int) -> PlaitError:
    instead = f" or {document.removal}" if document.removal else ""
    return PlaitError(f"{document.content} is {what} at byte {byte}; convert it to UTF-8 text{instead}")
