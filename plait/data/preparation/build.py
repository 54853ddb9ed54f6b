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
from plait.data.holdout import (
    DocumentSurvey,
    HoldoutRule,
    HoldoutSplit,
    choose_holdout_rule,
    holdout_spans,
    survey_documents,
    text_blocks,
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A run of text of one document; `bytes_done` counts the bytes of both splits up to its end."""

    text: str
    split: HoldoutSplit
    source: int
    before: str
    """The last character before it in its document; empty where the document begins."""
    bytes_done: int

    @property
    def first(self) -> bool:
        """Whether its document begins with it."""
        return not self.before


def build_corpus(work: BuildRequest, folder: Path) -> None:
    """Fill `folder` with the shards, the tokenizer and, last of all, the index; every file is on the disk when it
    returns. Goes on with what a killed one has left in the folder."""
    keeper = ProgressKeeper(folder, work.keep_every_bytes)
    found = _survey(work)
    total = sum(look.text_bytes for look in found)
    rule = choose_holdout_rule(sum(found, DocumentSurvey()), work.holdout)
    tokenizer = work.tokenizer or keeper.tokenizer() or _trained(work, rule, total)
    writers = _tokenize(work, rule, tokenizer, (folder, keeper), total)
    sizes: dict[HoldoutSplit, int] = {split: writer.text_bytes for split, writer in writers.items()}
    if work.holdout and not sizes["heldout"]:
        raise PlaitError(
            f"data.holdout = {work.holdout} of {total} bytes holds nothing out; "
            "give more text, a larger data.holdout, or 0"
        )
    tokenizer.save(folder)
    entries = list(chain.from_iterable(writer.entries for writer in writers.values()))
    index = _index(tokenizer, rule, sizes, entries, sum(writer.boundary_tokens for writer in writers.values()))
    write_index(folder, {**index, "sources": source_entries(work, found)})
    keeper.finish()


def _survey(work: BuildRequest) -> list[DocumentSurvey]:
    """Read every document once: unreadable text is found here, before hours of work."""
    found = []
    for source in work.sources:
        seen = DocumentSurvey()
        for look in survey_documents(source.documents(), work.holdout):
            seen += look
            work.on_progress(seen.text_bytes, 0, "reading")
        if not seen.text_bytes:
            raise PlaitError(f"{source.source.path} holds no text; fill it or take it out of {source.source.given_as}")
        found.append(seen)
    return found


def _trained(work: BuildRequest, rule: HoldoutRule, total: int) -> Tokenizer:
    def training_texts() -> Iterator[str]:
        for piece in _pieces(work, rule, GPT2_CUT):
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


def _pieces(work: BuildRequest, rule: HoldoutRule, cut: re.Pattern[str]) -> Iterator[_Piece]:
    # Sources without weights are one stream, so that a small file is not too short for a window of its own.
    weighted = work.sources[0].source.weight is not None
    done = 0
    for number, source in enumerate(work.sources):
        for document in source.documents():
            for span in holdout_spans(document, rule, work.holdout):
                blocks, before = text_blocks(document.read(span.start, span.stop)), ""
                for text in cut_into_pieces(blocks, cut):
                    done += len(text.encode("utf-8"))
                    owner = number if weighted else 0
                    yield _Piece(text=text, split=span.split, source=owner, before=before, bytes_done=done)
                    before = text[-1]


def _tokenize(
    work: BuildRequest, rule: HoldoutRule, tokenizer: Tokenizer, place: tuple[Path, ProgressKeeper], total: int
) -> dict[HoldoutSplit, ShardWriter]:
    folder, keeper = place

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
        for batch in _batches(islice(_pieces(work, rule, tokenizer.cut), count, None)):
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
    return writers


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
            writer.begin_document(piece.source)
        writer.add(np.array(ids, dtype=np.uint32))
        writer.text_bytes += len(piece.text.encode("utf-8"))
        writer.boundary_tokens += tokenizer.may_cut_token(piece.before, piece.text)


def _index(
    tokenizer: Tokenizer,
    rule: HoldoutRule,
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
        "held_out_by": rule,
        "train_bytes": sizes["train"],
        "heldout_bytes": sizes["heldout"],
        "shards": [index_row(entry) for entry in entries],
    }


def source_entries(work: BuildRequest, found: Sequence[DocumentSurvey]) -> list[dict[str, Any]]:
    """What the index says of each source."""
    return [
        {
            "path": source.source.path,
            "weight": source.source.weight,
            "documents": look.documents,
            "text_bytes": look.text_bytes,
            "files": [{"name": file.name, "sha256": work.file_hashes[file]} for file in source.files],
        }
        for source, look in zip(work.sources, found, strict=True)
    ]


def disk_full_error(folder: Path, written: int, done: int, total: int) -> PlaitError:
    """The error for a disk that filled up after `done` of `total` bytes of text."""
    needed = written * total / done if done else total
    return PlaitError(
        f"the disk is full: the tokens need about {format_bytes(needed)} in {folder.parent}; free that much, or "
        "work in a folder on another disk"
    )
