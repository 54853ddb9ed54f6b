"""Builds a corpus of text as one stream of tokens: surveys the documents, divides off the held-out part, tokenizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plait.data.documents import Document
from plait.data.holdout import Holdout, HoldoutSplit
from plait.data.preparation.build import (
    BuildRequest,
    SourceCounts,
    begun_survey,
    finish_corpus,
    source_counts,
    trained_tokenizer,
    write_shards,
)
from plait.data.preparation.cuts import GPT2_CUT, cut_into_pieces
from plait.data.preparation.kept_progress import ProgressKeeper, Writers
from plait.data.sources import OpenSource
from plait.errors import PlaitError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A run of text of one document."""

    text: str
    split: HoldoutSplit
    source: int
    stream: int
    """The source that its shard is of: 0 for all where they are concatenated."""
    before: str
    """The last character before it in its document; empty where the document begins."""
    text_bytes: int

    @property
    def texts(self) -> tuple[str]:
        """Its text, as that of an example is given."""
        return (self.text,)

    @property
    def first(self) -> bool:
        """Whether its document begins with it."""
        return not self.before


def build_stream(work: BuildRequest, folder: Path) -> None:
    """Fill `folder` with the shards, the tokenizer and, last of all, the index; every file is on the disk when it
    returns. Goes on with what a killed one has left in the folder."""
    keeper = ProgressKeeper(folder, work.keep_every_bytes)
    found, holdout = _survey(work)
    total = sum(counts.text_bytes for counts in found)
    tokenizer = work.tokenizer or keeper.tokenizer() or trained_tokenizer(work, _pieces(work, holdout, GPT2_CUT), total)

    def write(batch: Sequence[_Piece], writers: Writers) -> None:
        encoded = tokenizer.encode_pieces([piece.text for piece in batch], [piece.before for piece in batch])
        for piece, ids in zip(batch, encoded, strict=True):
            writer = writers[piece.split]
            if piece.first:
                writer.begin_document(piece.stream)
            writer.add(np.array(ids, dtype=np.uint32))
            writer.text_bytes += piece.text_bytes
            writer.boundary_tokens += tokenizer.may_cut_token(piece.before, piece.text)

    pieces = _pieces(work, holdout, tokenizer.cut)
    writers, held = write_shards(work, folder, keeper, tokenizer, pieces, write, total, bos=tokenizer.bos)
    if work.request.holdout and not writers["heldout"].text_bytes:
        raise PlaitError(
            f"data.holdout = {work.request.holdout} of {total} bytes holds nothing out; "
            "give more text, a larger data.holdout, or 0"
        )
    finish_corpus(work, folder, keeper, tokenizer, writers, found, held, held_out_by=holdout.rule)


def _survey(work: BuildRequest) -> tuple[list[SourceCounts], Holdout]:
    """Read every document once."""
    found, survey = [], begun_survey(work)
    for number, source in enumerate(work.sources):
        documents = text_bytes = 0
        for document, file in _documents(source):
            survey.add_document(document, number, file)
            documents, text_bytes = documents + 1, text_bytes + document.text_bytes
            work.on_progress(text_bytes, 0, "reading")
        found.append(source_counts(source, documents, text_bytes))
    return found, survey.choose("cut")


def _pieces(work: BuildRequest, holdout: Holdout, cut: re.Pattern[str]) -> Iterator[_Piece]:
    # Sources without weights are one stream, so that a small file is not too short for a window of its own.
    weighted = work.sources[0].source.weight is not None
    for number, source in enumerate(work.sources):
        for document, file in _documents(source):
            for span in holdout.spans(document, number, file):
                before = ""
                for text in cut_into_pieces(document.text(span.start, span.stop), cut):
                    yield _Piece(
                        text=text,
                        split=span.split,
                        source=number,
                        stream=number if weighted else 0,
                        before=before,
                        text_bytes=len(text.encode("utf-8")),
                    )
                    before = text[-1]


def _documents(source: OpenSource) -> Iterator[tuple[Document, str]]:
    """The documents of a source, each with the file that `OpenSource.by_file` tells apart."""
    for file, part in source.by_file():
        for document in part.documents():
            yield document, file
