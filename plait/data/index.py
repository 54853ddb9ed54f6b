"""The index of a prepared corpus: index.json, which names its shards, their hashes, and what they were made of."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from plait.data.holdout import HoldoutSplit
from plait.errors import PlaitError
from plait.regular_file import open_regular_file, read_regular_file

SHARD_FORMAT = 1
INDEX_FILE = "index.json"
_OWN_HASH = "index_sha256"

_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
SampleLayout = Literal["stream", "whole", "pairs"]
"""Whether samples are windows of one stream of documents, or whole examples that are packed into windows; of "pairs"
two and two examples, the preferred one first, are packed together."""

_Weight = Annotated[int | float, Field(gt=0, allow_inf_nan=False)]


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """The smallest little-endian type that holds every id."""
    return np.dtype("<u2") if vocabulary <= 1 << 16 else np.dtype("<u4")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard's entry in the index: its number of documents and the SHA-256 of its files; no mask where every
    token is learned."""

    name: Annotated[str, Field(pattern=r"^(train|heldout)-[0-9]{5,9}$")]
    split: HoldoutSplit
    source: _Count
    tokens: Annotated[_Count, Field(ge=2)]
    documents: Annotated[_Count, Field(ge=1)]
    sha256: _Sha256
    starts_sha256: _Sha256
    mask_sha256: _Sha256 | None = None

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 of each file of the shard, by name."""
        found = {f"{self.name}.bin": self.sha256, f"{self.name}.starts.npy": self.starts_sha256}
        return found if self.mask_sha256 is None else {**found, f"{self.name}.mask.bin": self.mask_sha256}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file that a source was read from, without its folder."""

    name: str
    sha256: _Sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """A text source's facts in the index that reading the corpus needs; `weight` is None if no source has one."""

    path: str
    weight: _Weight | None
    text_bytes: _Count = 0
    heldout_bytes: _Count | None = None
    """Bytes of its text that are held out; None in corpora of earlier versions."""
    files: tuple[SourceFile, ...] = ()
    """In reading order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCounts:
    """Counts of the records of chats, prompts and pairs that a corpus was made from, by outcome."""

    records: _Count = 0
    skipped: _Count = 0
    first_skipped: tuple[str, ...] = ()
    """Why the first of them cannot be learned from, with their lines."""
    chats: _Count = 0
    """Conversations that were kept, of a pair both."""
    remarks: Mapping[str, _Count] = field(default_factory=dict[str, int])
    """In how many chats "last answers" alone are learned, a template's "other prompt" differs from the text before an
    answer, or the text of a message is missing: "lost" and its role, or "reasoning"."""


NOTHING_COUNTED = RecordCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusIndex:
    """The contents of index.json that reading the corpus needs; the file may say more, for people."""

    format: Literal[1]
    dtype: Literal["<u2", "<u4"]
    vocabulary: Annotated[_Count, Field(ge=1, le=1 << 32)]
    eot: _Count
    tokenizer_hash: str
    train_bytes: _Count
    heldout_bytes: _Count
    shards: tuple[ShardEntry, ...]
    sources: Annotated[tuple[SourceEntry, ...], Field(min_length=1)]
    layout: SampleLayout = "stream"
    template: str = ""
    """The place of the chat template; empty if no conversation was read."""
    counts: RecordCounts = NOTHING_COUNTED
    bos: tuple[_Count, ...] = ()
    """Ids that each document and prompt begins with, as its tokenizer begins a text; empty: with `eot`."""
    boundary_tokens: _Count = 0
    """Of a stream, the cuts of long text that may have divided a token; of examples, the completions whose first
    characters are in a token of their prompt's end."""

    @property
    def weights(self) -> tuple[float, ...]:
        """The sources' weights; empty where they are concatenated instead of mixed."""
        return tuple(source.weight for source in self.sources if source.weight is not None)

    def content_hash(self) -> str:
        """Hash of what training depends on: tokens, document ends, masks, weights and ids, but not the paths of the
        text or the names of files."""
        kept = [self.dtype, self.vocabulary, self.eot, self.tokenizer_hash, self.weights]
        kept += [] if self.layout == "stream" else [self.layout]
        kept += [(entry.split, entry.source, *entry.files.values()) for entry in self.shards]
        return sha256(json.dumps(kept).encode()).hexdigest()


_INDEX = TypeAdapter(CorpusIndex)


def read_index(folder: Path) -> CorpusIndex:
    """Read and check the index of a corpus; raises PlaitError where there is none, or where it is not what was
    written."""
    if not folder.is_dir():
        raise PlaitError(f"there are no prepared data in {folder}; make them again: plait data with the run's recipe")
    try:
        text = read_regular_file(folder / INDEX_FILE)
        values = json.loads(text)
    except OSError as error:
        raise damaged(folder, f"{INDEX_FILE} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise damaged(folder, f"{INDEX_FILE} is not JSON") from None
    if isinstance(values, dict) and values.get("format") != SHARD_FORMAT:
        version = str(values.get("format", "not named"))[:20]
        raise damaged(folder, f"the format in {INDEX_FILE} is {version}, this version reads {SHARD_FORMAT}")
    try:
        index = _INDEX.validate_json(text, strict=True)
    except ValidationError as error:
        place = ".".join(map(str, error.errors(include_url=False)[0]["loc"]))
        raise damaged(folder, f"{INDEX_FILE}: {place or 'it'} is not what was written") from None
    # Corpora of earlier versions have no hash of the index itself.
    if (_OWN_HASH in values and values.pop(_OWN_HASH) != _hash(values)) or not _agrees(index):
        raise damaged(folder, f"{INDEX_FILE} is not what was written")
    return index


def write_index(folder: Path, values: dict[str, Any]) -> None:
    """Write the index, with a hash of itself, and wait until it is on the disk."""
    write_synced(folder / INDEX_FILE, json.dumps({**values, _OWN_HASH: _hash(values)}, indent=1))


def index_row(entry: ShardEntry) -> dict[str, Any]:
    """A shard's entry in index.json; the mask's hash is left out where there is no mask."""
    return {key: value for key, value in asdict(entry).items() if value is not None}


def damaged(folder: Path, what: str) -> PlaitError:
    """The error for a corpus that differs from what was written."""
    return PlaitError(
        f"the prepared data in {folder} are damaged ({what}); delete that folder and run `plait data` again"
    )


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, read in blocks."""
    state = sha256()
    with open_regular_file(path) as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def write_synced(path: Path, text: str) -> None:
    """Write a small text file and wait until it is on the disk."""
    file = path.open("wb")
    file.write(text.encode("utf-8"))
    sync_and_close(file)


def sync_and_close(file: BinaryIO) -> None:
    """Close a file after its data have reached the disk."""
    with file:
        file.flush()
        os.fsync(file.fileno())


def _hash(values: dict[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _agrees(index: CorpusIndex) -> bool:
    """Whether the parts of an index fit together."""
    names = [entry.name for entry in index.shards]
    return (
        index.dtype == token_dtype(index.vocabulary).str
        and max((index.eot, *index.bos)) < index.vocabulary
        and len(index.weights) in (0, len(index.sources))
        and all(entry.source < len(index.sources) for entry in index.shards)
        and all(entry.name.startswith(entry.split) for entry in index.shards)
        and len(set(names)) == len(names)
        and any(entry.split == "train" for entry in index.shards)
        and (index.layout == "stream" or all(entry.mask_sha256 for entry in index.shards))
        and (index.layout != "pairs" or all(entry.documents % 2 == 0 for entry in index.shards))
    )
