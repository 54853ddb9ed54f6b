"""Builds a corpus: surveys the text, divides off the held-out part, trains a tokenizer if requested, tokenizes,
writes the index."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from plait.data.conversations.chat_template import TemplateText
from plait.data.conversations.formats import SourceFormat
from plait.data.documents import Document
from plait.data.file_faults import FileFault
from plait.data.holdout import Holdout, HoldoutSplit, HoldoutSurvey, text_blocks
from plait.data.index import SHARD_FORMAT, ShardEntry, index_row, token_dtype, write_index
from plait.data.preparation.bpe_process import train_bpe_apart
from plait.data.preparation.cuts import GPT2_CUT, cut_into_pieces
from plait.data.preparation.kept_progress import KEEP_EVERY_BYTES, ProgressKeeper
from plait.data.preparation.tokens import Tokenizer, bpe_vocabulary
from plait.data.preparation.writer import ShardWriter
from plait.data.sources import OpenSource
from plait.errors import PlaitError
from plait.units import format_bytes

Progress = Callable[[int, int, str], None]
"""Called with the bytes done, the total bytes (0 if not known yet), and the name of the stage."""

TOKENIZER_SAMPLE_BYTES = 20_000_000
_BATCH_CHARACTERS = 1 << 19
"""Encoded in one call, during which no signal is heeded: half a second on one core."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a disk that is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """Everything that determines a corpus; with `tokenizer` None, byte-level BPE of `vocabulary` entries is trained."""

    sources: tuple[OpenSource, ...]
    file_hashes: dict[Path, str]
    tokenizer: Tokenizer | None
    vocabulary: int | None
    holdout: float
    shard_tokens: int
    on_progress: Progress
    formats: tuple[SourceFormat, ...]
    """Of each source."""
    template: TemplateText | None = None
    """The tokenizer's own chat template; None where it has none."""
    keep_every_bytes: int = KEEP_EVERY_BYTES
    """Of text: how often the progress is kept, from which a preparation that was killed goes on."""
    bad_records: float = 0.0
    """The fraction of records of chats, prompts and pairs that may be skipped."""
    left_out: tuple[FileFault, ...] = ()
    """Files of the sources that cannot be learnt from, for the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A run of text of one document; `bytes_done` counts the bytes of both splits up to its end."""

    text: str
    split: HoldoutSplit
    source: int
    stream: int
    """The source that its shard is of: 0 for all where they are concatenated."""
    before: str
    """The last character before it in its document; empty where the document begins."""
    nbytes: int
    bytes_done: int

    @property
    def first(self) -> bool:
        """Whether its document begins with it."""
        return not self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounts:
    """Documents (or examples) of a source, and the bytes of their text."""

    documents: int
    text_bytes: int


def build_corpus(work: BuildRequest, folder: Path) -> None:
    """Fill `folder` with the shards, the tokenizer and, last of all, the index; every file is on the disk when it
    returns. Goes on with what a killed one has left in the folder."""
    keeper = ProgressKeeper(folder, work.keep_every_bytes)
    found, holdout = _survey(work)
    total = sum(counts.text_bytes for counts in found)
    tokenizer = work.tokenizer or keeper.tokenizer() or _trained(work, holdout, total)
    writers, held = _tokenize(work, holdout, tokenizer, folder, keeper, total)
    sizes: dict[HoldoutSplit, int] = {split: writer.text_bytes for split, writer in writers.items()}
    if work.holdout and not sizes["heldout"]:
        raise PlaitError(
            f"data.holdout = {work.holdout} of {total} bytes holds nothing out; "
            "give more text, a larger data.holdout, or 0"
        )
    tokenizer.save(folder)
    entries = list(chain.from_iterable(writer.entries for writer in writers.values()))
    boundary_tokens = sum(writer.boundary_tokens for writer in writers.values())
    index = _index(tokenizer, holdout, sizes, entries, boundary_tokens)
    write_index(folder, {**index, "sources": source_entries(work, found, held), **left_out_entries(work)})
    keeper.finish()


def _survey(work: BuildRequest) -> tuple[list[SourceCounts], Holdout]:
    """Read every document once: unreadable text is found here, before hours of work."""
    found, survey = [], begun_survey(work)
    for number, source in enumerate(work.sources):
        documents = text_bytes = 0
        for document, file in _documents(source):
            survey.add_document(document, number, file)
            documents, text_bytes = documents + 1, text_bytes + document.text_bytes
            work.on_progress(text_bytes, 0, "reading")
        found.append(source_counts(source, documents, text_bytes))
    return found, survey.choose("cut")


def begun_survey(work: BuildRequest) -> HoldoutSurvey:
    """A survey to which nothing was added yet."""
    files = sum(len({file for file, _ in source.by_file()}) for source in work.sources)
    return HoldoutSurvey(work.holdout, files)


def source_counts(source: OpenSource, documents: int, text_bytes: int) -> SourceCounts:
    """Raises PlaitError where there is no text."""
    if not text_bytes:
        raise PlaitError(f"{source.source.path} holds no text; fill it or take it out of {source.source.given_as}")
    return SourceCounts(documents=documents, text_bytes=text_bytes)


def _trained(work: BuildRequest, holdout: Holdout, total: int) -> Tokenizer:
    def training_texts() -> Iterator[str]:
        for piece in _pieces(work, holdout, GPT2_CUT):
            if piece.split == "train":
                work.on_progress(piece.bytes_done, total, "training the tokenizer")
                yield piece.text

    def wait() -> None:
        work.on_progress(0, 0, "building the tokenizer's vocabulary")

    return train_bpe_apart(sample_of_text(training_texts(), total), work.vocabulary or bpe_vocabulary(total), wait)


def sample_of_text(texts: Iterable[str], total: int) -> Iterator[str]:
    """At most TOKENIZER_SAMPLE_BYTES of text. Pieces are chosen by their hash, so the choice does not depend on
    chance."""
    share = 1.0 if total <= TOKENIZER_SAMPLE_BYTES else 0.95 * TOKENIZER_SAMPLE_BYTES / total
    taken = 0
    for text in texts:
        data = text.encode("utf-8")
        chosen = int.from_bytes(blake2b(data, digest_size=8).digest(), "little") < share * 2**64
        if chosen and taken + len(data) <= TOKENIZER_SAMPLE_BYTES:
            taken += len(data)
            yield text


def _pieces(work: BuildRequest, holdout: Holdout, cut: re.Pattern[str]) -> Iterator[_Piece]:
    # Sources without weights are one stream, so that a small file is not too short for a window of its own.
    weighted = work.sources[0].source.weight is not None
    done = 0
    for number, source in enumerate(work.sources):
        for document, file in _documents(source):
            for span in holdout.spans(document, number, file):
                blocks, before = text_blocks(document.read(span.start, span.stop)), ""
                for text in cut_into_pieces(blocks, cut):
                    nbytes = len(text.encode("utf-8"))
                    done += nbytes
                    yield _Piece(
                        text=text,
                        split=span.split,
                        source=number,
                        stream=number if weighted else 0,
                        before=before,
                        nbytes=nbytes,
                        bytes_done=done,
                    )
                    before = text[-1]


def _documents(source: OpenSource) -> Iterator[tuple[Document, str]]:
    """The documents of a source, each with the file that `OpenSource.by_file` tells apart."""
    for file, part in source.by_file():
        for document in part.documents():
            yield document, file


def _tokenize(
    work: BuildRequest, holdout: Holdout, tokenizer: Tokenizer, folder: Path, keeper: ProgressKeeper, total: int
) -> tuple[dict[HoldoutSplit, ShardWriter], list[int]]:
    """Write all shards; returns their writers, and the bytes that each source holds out."""
    held = [0] * len(work.sources)

    def pieces() -> Iterator[_Piece]:
        # From the start, also where an earlier process is continued.
        for piece in _pieces(work, holdout, tokenizer.cut):
            held[piece.source] += piece.nbytes if piece.split == "heldout" else 0
            yield piece

    def writer(split: HoldoutSplit) -> ShardWriter:
        dtype = token_dtype(tokenizer.vocabulary)
        marks: Literal["none", "kept"] = "kept" if tokenizer.bos else "none"
        limit = work.shard_tokens
        return ShardWriter(
            folder, split, eot=tokenizer.eot, bos=tokenizer.bos, dtype=dtype, shard_tokens=limit, marks=marks
        )

    writers: dict[HoldoutSplit, ShardWriter] = {"train": writer("train"), "heldout": writer("heldout")}
    done = 0
    try:
        count, done = keeper.begin(tokenizer, writers)
        for batch in _batches(islice(pieces(), count, None)):
            work.on_progress(done, total, "tokenizing")
            _write(batch, tokenizer, writers)
            count, done = count + len(batch), batch[-1].bytes_done
            keeper.written(count, done, writers)
        for each in writers.values():
            each.close_shard()
    except OSError as error:
        if error.errno in NO_ROOM:
            raise disk_full_error(folder, sum(each.bytes_written for each in writers.values()), done, total) from error
        raise
    work.on_progress(total, total, "tokenizing")
    return writers, held


def _batches(stream: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    characters = 0
    for piece in stream:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write(batch: Sequence[_Piece], tokenizer: Tokenizer, writers: dict[HoldoutSplit, ShardWriter]) -> None:
    encoded = tokenizer.encode_pieces([piece.text for piece in batch], [piece.before for piece in batch])
    for piece, ids in zip(batch, encoded, strict=True):
        writer = writers[piece.split]
        if piece.first:
            writer.begin_document(piece.stream)
        writer.add(np.array(ids, dtype=np.uint32))
        writer.text_bytes += piece.nbytes
        writer.boundary_tokens += tokenizer.may_cut_token(piece.before, piece.text)


def _index(
    tokenizer: Tokenizer,
    holdout: Holdout,
    sizes: dict[HoldoutSplit, int],
    entries: list[ShardEntry],
    boundary_tokens: int,
) -> dict[str, Any]:
    return {
        "format": SHARD_FORMAT,
        "dtype": token_dtype(tokenizer.vocabulary).str,
        "vocabulary": tokenizer.vocabulary,
        "eot": tokenizer.eot,
        **({"bos": tokenizer.bos} if tokenizer.bos else {}),
        **({"boundary_tokens": boundary_tokens} if boundary_tokens else {}),
        "tokenizer_hash": tokenizer.hash,
        "held_out_by": holdout.rule,
        "train_bytes": sizes["train"],
        "heldout_bytes": sizes["heldout"],
        "shards": [index_row(entry) for entry in entries],
    }


def source_entries(work: BuildRequest, found: Sequence[SourceCounts], held: Sequence[int]) -> list[dict[str, Any]]:
    """What the index says of each source; `held` are the bytes of text that each holds out."""
    return [
        {
            "path": source.source.path,
            "weight": source.source.weight,
            "documents": counts.documents,
            "text_bytes": counts.text_bytes,
            "heldout_bytes": held_bytes,
            "files": [{"name": file.name, "sha256": work.file_hashes[file]} for file in source.files],
        }
        for source, counts, held_bytes in zip(work.sources, found, held, strict=True)
    ]


def left_out_entries(work: BuildRequest) -> dict[str, Any]:
    """What the index says of the files that were left out; nothing where none was."""
    rows = [{"name": fault.file.name, "why": fault.what} for fault in work.left_out]
    return {"left_out": rows} if rows else {}


def disk_full_error(folder: Path, written: int, done: int, total: int) -> PlaitError:
    """The error for a disk that filled up after `done` of `total` bytes of text."""
    needed = written * total / done if done else total
    return PlaitError(
        f"the disk is full: the tokens need about {format_bytes(needed)} in {folder.parent}; free that much, or "
        "work in a folder on another disk"
    )
