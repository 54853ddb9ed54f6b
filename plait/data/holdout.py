"""Chooses the text that is held out for evaluation: about the same share of each source, of long and short documents.

The choice is a function of the documents' contents, never of chance, of their order in a file, or of machines.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import numpy as np

from plait.data.documents import Document

HoldoutSplit = Literal["train", "heldout"]
HoldoutRule = Literal["none", "documents", "tails"]

FEWEST_DOCUMENTS = 20
"""With fewer documents, holding out whole ones would be too coarse; the tail of each is held out instead."""
SHORTEST_TAIL_BYTES = 512
"""Shorter tails are not cut off documents: they would be a line or less."""
_MOST_LISTED = 1 << 18
"""Documents that a survey lists one by one; memory stays below some tens of MB for any corpus."""
_FEWEST_LISTED = 1 << 10
"""Documents listed of each stratum, however many strata there are."""
_NEGLIGIBLE = 0.02
"""Share of a source's held-out bytes that may be missing before a document is cut to supply them."""
_FURTHEST_LINE_BYTES = 1 << 16

# Note [strata]: documents are grouped by source, by file within it, and by length (a factor of four), and each group
# holds out the requested share of its bytes: documents in the order of their hashes, whole as long as they fit, then
# the tail of the next one. A group with too few documents for one whole (three books at 5 %) holds out the tail of
# each. What is missing or too much in one group is made up for in the next of the same source, so that many small
# groups together have their share. Copies of a text count as one document: all of them are held out, cut at the same
# place, or none; a text in several sources is decided in the first of them. In a group with more documents than can be
# listed, each is held out if its hash is below the requested share: by the law of large numbers that is close to the
# share.


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteSpan:
    """A byte range of a document, and the split that it belongs to."""

    split: HoldoutSplit
    start: int
    stop: int


@dataclass(frozen=True, slots=True, order=True)
class _Stratum:
    """Documents of which the same share is held out."""

    source: int
    length: int
    """Logarithm of a document's bytes to the base 4; 0 where lengths do not matter."""
    file: str


@dataclass(slots=True)
class _Members:
    """The documents of a stratum: hashes and sizes, and how many bytes they have; not listed where there are too many
    of them."""

    nbytes: int = 0
    hashes: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("Q"))
    is_listed: bool = True

    def add(self, text_hash: int, nbytes: int, most: int) -> None:
        self.nbytes += nbytes
        if not self.is_listed:
            return
        self.hashes.append(text_hash)
        self.sizes.append(nbytes)
        if len(self.hashes) > most:
            self.hashes, self.sizes, self.is_listed = array("Q"), array("Q"), False

    def groups(self) -> list[_Copies]:
        """The distinct texts by ascending hash."""
        hashes, first, groups, counts = np.unique(
            np.array(self.hashes, dtype=np.uint64), return_index=True, return_inverse=True, return_counts=True
        )
        totals = np.zeros(len(hashes), dtype=np.int64)
        np.add.at(totals, groups, np.array(self.sizes, dtype=np.int64))
        sizes = np.array(self.sizes, dtype=np.int64)[first]
        rows = zip(hashes.tolist(), sizes.tolist(), counts.tolist(), totals.tolist(), strict=True)
        return [_Copies(text_hash=a, nbytes=b, copies=c, total_bytes=d) for a, b, c, d in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """All documents with the same hash. Those of one text have `nbytes` each; examples with one prompt may differ."""

    text_hash: int
    nbytes: int
    copies: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdout:
    """Which text is held out; made by `HoldoutSurvey.choose`."""

    rule: HoldoutRule
    fraction: float
    starts: Mapping[int, int] = field(default_factory=dict)
    """Where the held-out part of each text begins, by the text's hash: 0 if all of it is held out."""
    crowded: frozenset[_Stratum] = frozenset()
    """The strata whose other documents are held out by their hash alone."""

    def spans(self, document: Document, source: int, file: str) -> tuple[ByteSpan, ...]:
        """The spans into which a document is divided; every byte of it lies in exactly one."""
        end = document.text_bytes
        if self.rule == "none":
            cut = end
        elif self.rule == "tails":
            cut = _character_start(document, end - int(end * self.fraction))
        else:
            stratum = _Stratum(source, _length_class(end), file)
            start = self._start(text_hash(document.read()), stratum, end)
            cut = _tail_start(document, start) if 0 < start < end else start
        both = (ByteSpan(split="train", start=0, stop=cut), ByteSpan(split="heldout", start=cut, stop=end))
        return tuple(span for span in both if span.stop > span.start)

    def split_of_prompt(self, prompt_hash: int, source: int, file: str) -> HoldoutSplit:
        """The split of all examples with this prompt."""
        return "train" if self._start(prompt_hash, _Stratum(source, 0, file), 1) else "heldout"

    def _start(self, text_hash: int, stratum: _Stratum, end: int) -> int:
        found = self.starts.get(text_hash)
        if found is None:
            return 0 if stratum in self.crowded and text_hash < self.fraction * 2**64 else end
        return found


class HoldoutSurvey:
    """Collects hashes and sizes of documents (or of examples, by their prompts) in a first pass over all sources.

    `strata_files` is the number of sources and files that are told apart.
    """

    def __init__(self, fraction: float, strata_files: int) -> None:
        self._fraction = fraction
        self._most = max(_FEWEST_LISTED, _MOST_LISTED // max(1, strata_files))
        self._strata: dict[_Stratum, _Members] = {}
        self._documents = 0

    def add_document(self, document: Document, source: int, file: str) -> None:
        """Read a document whose text was checked before."""
        stratum = _Stratum(source, _length_class(document.text_bytes), file)
        self._add(stratum, text_hash(document.read()), document.text_bytes)

    def add_example(self, prompt_hash: int, nbytes: int, source: int, file: str) -> None:
        """Add an example of `nbytes` bytes of text."""
        self._add(_Stratum(source, 0, file), prompt_hash, nbytes)

    def _add(self, stratum: _Stratum, text_hash: int, nbytes: int) -> None:
        self._documents += 1
        self._strata.setdefault(stratum, _Members()).add(text_hash, nbytes, self._most)

    def choose(self, long_texts: Literal["cut", "whole"]) -> Holdout:
        """Choose what is held out; with "whole" no document is cut, however long. See Note [strata]."""
        if self._fraction == 0:
            return Holdout(rule="none", fraction=0.0)
        if long_texts == "cut" and self._documents < FEWEST_DOCUMENTS:
            return Holdout(rule="tails", fraction=self._fraction)
        starts: dict[int, int] = {}
        for source in sorted({stratum.source for stratum in self._strata}):
            strata = [stratum for stratum in self._strata if stratum.source == source]
            missing, wanted = 0.0, self._fraction * sum(self._strata[stratum].nbytes for stratum in strata)
            for stratum in sorted(strata, key=lambda one: (-one.length, one.file)):
                if (members := self._strata[stratum]).is_listed:
                    least = max(SHORTEST_TAIL_BYTES, _NEGLIGIBLE * wanted) if long_texts == "cut" else float("inf")
                    missing = self._take(members, missing, least, starts)
        crowded = frozenset(stratum for stratum, members in self._strata.items() if not members.is_listed)
        if crowded:  # a copy in such a stratum must be decided as it is here
            for members in self._strata.values():
                for one in members.groups():
                    if one.text_hash < self._fraction * 2**64:
                        starts.setdefault(one.text_hash, max(1, one.nbytes))
        if not starts and not crowded and long_texts == "cut":
            return Holdout(rule="tails", fraction=self._fraction)
        return Holdout(rule="documents", fraction=self._fraction, starts=starts, crowded=crowded)

    def _take(self, members: _Members, missing: float, least_cut: float, starts: dict[int, int]) -> float:
        """Add to `starts` what is held out of one stratum, and `missing` bytes of those before it; returns the bytes
        that are missing after it. Tails of fewer than `least_cut` bytes in all are not cut off."""
        groups, own = members.groups(), self._fraction * members.nbytes
        left, taken, fresh = own + missing, 0.0, list[_Copies]()
        for one in groups:
            if one.text_hash in starts:
                start = starts[one.text_hash]
                held = (one.nbytes - start) * one.copies if start else one.total_bytes
                left, taken = left - held, taken + held
            else:
                fresh.append(one)
        can_cut_each = own >= max(least_cut, SHORTEST_TAIL_BYTES * sum(one.copies for one in groups))
        if len(groups) * self._fraction < 1 and can_cut_each:
            for one in fresh:
                tail = int(one.nbytes * self._fraction)
                starts[one.text_hash], left = one.nbytes - tail, left - tail * one.copies
            return left
        for one in fresh:
            if left <= 0:
                break
            if taken and taken + one.total_bytes > 2 * own:  # more would make up for another stratum with this one
                continue
            tail = int(left / one.copies)
            is_cut = one.total_bytes > left >= least_cut and tail >= SHORTEST_TAIL_BYTES
            if is_cut:
                starts[one.text_hash] = one.nbytes - tail
                return left - tail * one.copies
            if one.total_bytes < 2 * left:  # nearer to the share than without it
                starts[one.text_hash] = 0
                left, taken = left - one.total_bytes, taken + one.total_bytes
        return left


def text_hash(blocks: Iterable[bytes]) -> int:
    """64 bits of a text's hash. Equal texts have equal hashes, so copies are in one split."""
    state = blake2b(digest_size=8)
    for block in blocks:
        state.update(block)
    return int.from_bytes(state.digest(), "little")


def _length_class(nbytes: int) -> int:
    return nbytes.bit_length() // 2


def _character_start(document: Document, at: int) -> int:
    """The offset of the first UTF-8 character that starts at or after `at` (continuation bytes are 10xxxxxx)."""
    head = b"".join(document.read(at, min(at + 4, document.text_bytes)))
    return at + next((i for i, byte in enumerate(head) if byte & 0xC0 != 0x80), len(head))


def _tail_start(document: Document, at: int) -> int:
    """The beginning of a paragraph or line nearest to `at`, at most a sixteenth of the tail away; where there is none,
    the nearest space, else the next character."""
    reach = min((document.text_bytes - at) // 16, _FURTHEST_LINE_BYTES)
    first = max(0, at - reach)
    text = b"".join(document.read(first, min(at + reach, document.text_bytes)))

    def nearest(pattern: bytes, edge: Literal["start", "end"], within: int) -> int | None:
        places = (first + (found.end() if edge == "end" else found.start()) for found in re.finditer(pattern, text))
        fitting = [place for place in places if abs(place - at) <= within and 0 < place < document.text_bytes]
        return min(fitting, key=lambda place: abs(place - at), default=None)

    paragraph = nearest(rb"\n(?:\r?\n)+", "end", reach // 4)
    line = nearest(rb"\n", "end", reach) if paragraph is None else paragraph
    space = nearest(rb"(?<=\S) (?=\S)", "start", reach) if line is None else line
    return _character_start(document, at) if space is None else space
