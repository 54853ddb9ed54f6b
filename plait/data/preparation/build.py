"""What building a corpus takes, whether of a stream of text or of whole examples: a survey, a tokenizer, shards that a
killed process goes on with, and the index."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

from plait.data.conversations.chat_template import TemplateText
from plait.data.conversations.formats import RequestedFormat, SourceFormat
from plait.data.file_faults import FileFault
from plait.data.holdout import HoldoutSplit, HoldoutSurvey
from plait.data.index import SHARD_FORMAT, index_row, token_dtype, write_index
from plait.data.preparation.bpe_process import train_bpe_apart
from plait.data.preparation.kept_progress import KEEP_EVERY_BYTES, ProgressKeeper, Writers
from plait.data.preparation.tokens import Tokenizer, bpe_vocabulary
from plait.data.preparation.writer import ShardWriter
from plait.data.sources import OpenSource, Source
from plait.errors import PlaitError, is_out_of_space
from plait.units import format_bytes

Progress = Callable[[int, int, str], None]
"""Called with the bytes done, the total bytes (0 if not known yet), and the name of the stage."""

TOKENIZER_SAMPLE_BYTES = 20_000_000
_BATCH_CHARACTERS = 1 << 19
"""Encoded in one call, during which no signal is handled: half a second on one core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """The corpus that a recipe needs: `tokenizer` is "gpt2", "bpe" or a path, `holdout` a fraction of the text."""

    sources: tuple[Source, ...]
    tokenizer: str
    vocabulary: int | None
    holdout: float
    format: RequestedFormat = "auto"
    template_folders: tuple[Path, ...] = ()
    """Places of the chat template, in this order, before the tokenizer's own folder."""
    chat_template: str = "auto"
    """A built-in template's name, or a file; "auto" takes the one in these folders."""
    bad_records: float = 0.0
    """The fraction of records that may be skipped as none that can be learned from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """Everything that determines a corpus; with `tokenizer` None, byte-level BPE of the requested `vocabulary` is
    trained."""

    request: DataRequest
    sources: tuple[OpenSource, ...]
    file_hashes: dict[Path, str]
    tokenizer: Tokenizer | None
    shard_tokens: int
    on_progress: Progress
    formats: tuple[SourceFormat, ...]
    """The format of each source."""
    template: TemplateText | None = None
    """The tokenizer's own chat template; None where it has none."""
    keep_every_bytes: int = KEEP_EVERY_BYTES
    """Bytes of text between two saves of the progress, from which a killed preparation continues."""
    left_out: tuple[FileFault, ...] = ()
    """Files of the sources that cannot be learned from, for the index."""


class TextUnit(Protocol):
    """A piece of a document's text, or a whole example: its texts, their bytes in UTF-8, and where they belong."""

    @property
    def texts(self) -> Sequence[str]: ...
    @property
    def text_bytes(self) -> int: ...
    @property
    def source(self) -> int: ...
    @property
    def split(self) -> HoldoutSplit: ...


_Unit = TypeVar("_Unit", bound=TextUnit)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCounts:
    """Documents (or examples) of a source, and the bytes of their text."""

    documents: int
    text_bytes: int


def begun_survey(work: BuildRequest) -> HoldoutSurvey:
    """A survey to which nothing was added yet."""
    files = sum(len({file for file, _ in source.by_file()}) for source in work.sources)
    return HoldoutSurvey(work.request.holdout, files)


def source_counts(source: OpenSource, documents: int, text_bytes: int) -> SourceCounts:
    """Raises PlaitError where there is no text."""
    if not text_bytes:
        raise PlaitError(f"{source.source.path} holds no text; fill it or take it out of {source.source.given_as}")
    return SourceCounts(documents=documents, text_bytes=text_bytes)


def trained_tokenizer(work: BuildRequest, units: Iterable[TextUnit], total: int) -> Tokenizer:
    """A tokenizer trained on what is not held out; `total` bytes of text are in all of the units."""

    def training_texts() -> Iterator[str]:
        done = 0
        for one in units:
            done += one.text_bytes
            work.on_progress(done, total, "training the tokenizer")
            if one.split == "train":
                yield from one.texts

    def wait() -> None:
        work.on_progress(0, 0, "building the tokenizer's vocabulary")

    return train_bpe_apart(
        sample_of_text(training_texts(), total), work.request.vocabulary or bpe_vocabulary(total), wait
    )


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


def write_shards(
    work: BuildRequest,
    folder: Path,
    keeper: ProgressKeeper,
    tokenizer: Tokenizer,
    units: Iterable[_Unit],
    write: Callable[[Sequence[_Unit], Writers], None],
    total: int,
    *,
    bos: Sequence[int] = (),
    layout: Literal["stream", "whole"] = "stream",
) -> tuple[Writers, list[int]]:
    """Write all shards, a batch of units at a time; returns their writers, and the bytes of text that each source holds
    out. The units are read from the start also where an earlier process is continued."""
    held = [0] * len(work.sources)

    def noted() -> Iterator[_Unit]:
        for one in units:
            held[one.source] += one.text_bytes if one.split == "heldout" else 0
            yield one

    def writer(split: HoldoutSplit) -> ShardWriter:
        marks: Literal["none", "kept"] = "kept" if bos or layout == "whole" else "none"
        dtype, limit = token_dtype(tokenizer.vocabulary), work.shard_tokens
        return ShardWriter(folder, split, eot=tokenizer.eot, bos=bos, dtype=dtype, shard_tokens=limit, marks=marks)

    writers: Writers = {}
    done = 0
    try:
        writers, count, done = keeper.begin(tokenizer, lambda: {"train": writer("train"), "heldout": writer("heldout")})
        for batch in _batches(islice(noted(), count, None)):
            work.on_progress(done, total, "tokenizing")
            write(batch, writers)
            count, done = count + len(batch), done + sum(one.text_bytes for one in batch)
            keeper.written(count, done, writers)
        for each in writers.values():
            each.close_shard()
    except OSError as error:
        if is_out_of_space(error) or error.errno == errno.EFBIG:
            raise _disk_full_error(folder, sum(each.bytes_written for each in writers.values()), done, total) from error
        raise
    work.on_progress(total, total, "tokenizing")
    return writers, held


def _batches(units: Iterable[_Unit]) -> Iterator[list[_Unit]]:
    batch, characters = list[_Unit](), 0
    for one in units:
        batch.append(one)
        characters += sum(map(len, one.texts))
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def finish_corpus(
    work: BuildRequest,
    folder: Path,
    keeper: ProgressKeeper,
    tokenizer: Tokenizer,
    writers: Writers,
    found: Sequence[SourceCounts],
    held: Sequence[int],
    *,
    held_out_by: str,
    examples: Mapping[str, Any] = MappingProxyType({}),
    counts: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the tokenizer and, last, the index, with what it says of whole `examples` and the `counts` of records."""
    tokenizer.save(folder)
    boundary_tokens = sum(writer.boundary_tokens for writer in writers.values())
    left_out = [{"name": fault.file.name, "why": fault.what} for fault in work.left_out]
    index = {
        "format": SHARD_FORMAT,
        **examples,
        "dtype": token_dtype(tokenizer.vocabulary).str,
        "vocabulary": tokenizer.vocabulary,
        "eot": tokenizer.eot,
        **({"bos": tokenizer.bos} if tokenizer.bos else {}),
        **({"boundary_tokens": boundary_tokens} if boundary_tokens else {}),
        "tokenizer_hash": tokenizer.hash,
        "held_out_by": held_out_by,
        "train_bytes": writers["train"].text_bytes,
        "heldout_bytes": writers["heldout"].text_bytes,
        "shards": [index_row(entry) for writer in writers.values() for entry in writer.entries],
        **counts,
        "sources": _source_entries(work, found, held),
        **({"left_out": left_out} if left_out else {}),
    }
    write_index(folder, index)
    keeper.finish()


def _source_entries(work: BuildRequest, found: Sequence[SourceCounts], held: Sequence[int]) -> list[dict[str, Any]]:
    """The index's entry for each source; `held` are the bytes of text that each holds out."""
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


def _disk_full_error(folder: Path, written: int, done: int, total: int) -> PlaitError:
    """The error for a disk that filled up after `done` of `total` bytes of text."""
    needed = written * total / done if done else total
    return PlaitError(
        f"the disk is full: the tokens need about {format_bytes(needed)} in {folder.parent}; free that much, or "
        "work in a folder on another disk"
    )
