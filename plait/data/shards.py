"""Token shards on disk: written once as a stream, then memory-mapped by everyone who trains or evaluates."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib.stride_tricks import as_strided

from plait.data.holdout import Split
from plait.errors import PlaitError

# Note [stream of a shard]: <eot> document <eot> document … document <eot>. Each document is preceded by the end of text
# and one more closes the stream, so over windows shifted by one every token and every end is a target exactly once, and
# a document's first token is predicted from <eot>. A document that outgrows a shard goes on in the next one as if it
# began there: one false end in SHARD_TOKENS.

FORMAT = 1
SHARD_TOKENS = 2**28


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """The smallest little-endian type that holds every id."""
    return np.dtype("<u2") if vocabulary <= 1 << 16 else np.dtype("<u4")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A shard as the index lists it: `documents` starts, SHA-256 of the token and of the starts file."""

    name: str
    split: Split
    source: int
    tokens: int
    documents: int
    sha256: str
    starts_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A memory-mapped stream of tokens and the positions of the <eot> before each of its documents."""

    source: int
    tokens: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]

    def rows(self, starts: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
        """The `length` tokens from each of the given positions, one row each."""
        step = self.tokens.itemsize
        every = as_strided(self.tokens, (len(self.tokens) - length + 1, length), (step, step), writeable=False)
        return every[starts]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Prepared data; `weights` is empty where the sources are simply one after the other."""

    folder: Path
    vocabulary: int
    eot: int
    dtype: np.dtype[Any]
    train: tuple[Shard, ...]
    heldout: tuple[Shard, ...]
    train_bytes: int
    heldout_bytes: int
    weights: tuple[float, ...]
    source_names: tuple[str, ...]
    content_hash: str
    entries: tuple[ShardEntry, ...]

    @property
    def train_tokens(self) -> int:
        return sum(len(shard.tokens) for shard in self.train)

    @property
    def heldout_tokens(self) -> int:
        return sum(len(shard.tokens) for shard in self.heldout)

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    def verify(self) -> None:
        """Read everything and compare the hashes; raises PlaitError naming the first file that differs."""
        for entry in self.entries:
            for name, expected in (
                (f"{entry.name}.bin", entry.sha256),
                (f"{entry.name}.starts.npy", entry.starts_sha256),
            ):
                if file_sha256(self.folder / name) != expected:
                    raise _damaged(self.folder, f"{name} is not what was written")


class ShardWriter:
    """Writes one split as numbered shards; call `begin_document`, `add`, … and at the end `close_shard`."""

    def __init__(self, folder: Path, split: Split, *, eot: int, dtype: np.dtype[Any], shard_tokens: int) -> None:
        assert shard_tokens >= 8
        self.entries: list[ShardEntry] = []
        self.bytes_written = self.text_bytes = 0
        self._folder, self._dtype, self._limit = folder, dtype, shard_tokens
        self._split: Split = split
        self._eot = np.array([eot], dtype=dtype)
        self._file: BinaryIO | None = None
        self._source = self._tokens = 0

    def begin_document(self, source: int) -> None:
        """Start a document; a new shard is opened for a new source, and before one is so full that documents tear."""
        if source != self._source or self._tokens >= self._limit - self._limit // 8:
            self.close_shard()
        if self._file is None:
            self._open(source)
        self._starts.append(self._tokens)
        self._write(self._eot)

    def add(self, ids: np.ndarray[Any, Any]) -> None:
        """Append tokens to the document that was begun."""
        while len(ids):
            room = self._limit - 1 - self._tokens  # the closing <eot> has its place reserved
            self._write(ids[:room])
            ids = ids[room:]
            if len(ids):
                self.close_shard()
                self.begin_document(self._source)

    def close_shard(self) -> None:
        """Close the stream with its last <eot> and put it safely on the disk; nothing happens where none is open."""
        if self._file is None:
            return
        self._write(self._eot)
        _sync_and_close(self._file)
        self._file = None
        starts_sha256 = _save_starts(self._folder / f"{self._name}.starts.npy", self._starts)
        entry = ShardEntry(
            name=self._name,
            split=self._split,
            source=self._source,
            tokens=self._tokens,
            documents=len(self._starts),
            sha256=self._hash.hexdigest(),
            starts_sha256=starts_sha256,
        )
        self.entries.append(entry)
        self._tokens = 0

    def _open(self, source: int) -> None:
        self._name = f"{self._split}-{len(self.entries):05d}"
        self._file = (self._folder / f"{self._name}.bin").open("wb", buffering=1 << 20)
        self._source, self._starts, self._hash = source, [], sha256()

    def _write(self, ids: np.ndarray[Any, Any]) -> None:
        assert self._file is not None
        data = np.ascontiguousarray(ids, dtype=self._dtype).data
        self._file.write(data)
        self._hash.update(data)
        self._tokens += len(ids)
        self.bytes_written += data.nbytes


def open_corpus(folder: Path) -> Corpus:
    """Memory-map a prepared corpus; raises PlaitError where a file's size disagrees with the index."""
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise _damaged(folder, f"index.json has format {index['format']}, this version reads {FORMAT}")
        entries = tuple(ShardEntry(**entry) for entry in index["shards"])
        dtype = np.dtype(index["dtype"])
        shards = [(entry.split, _open_shard(folder, entry, dtype)) for entry in entries]
        weights = tuple(source["weight"] for source in index["sources"] if source["weight"] is not None)
        return Corpus(
            folder=folder,
            vocabulary=index["vocabulary"],
            eot=index["eot"],
            dtype=dtype,
            train=tuple(shard for split, shard in shards if split == "train"),
            heldout=tuple(shard for split, shard in shards if split == "heldout"),
            train_bytes=index["train_bytes"],
            heldout_bytes=index["heldout_bytes"],
            weights=weights,
            source_names=tuple(source["path"] for source in index["sources"]),
            content_hash=_content_hash(index, entries, weights),
            entries=entries,
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _damaged(folder, f"it cannot be read: {error!r}") from None


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, read in blocks."""
    state = sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def write_synced(path: Path, text: str) -> None:
    """Write a small text file and wait until it is on the disk."""
    file = path.open("wb")
    file.write(text.encode("utf-8"))
    _sync_and_close(file)


def _open_shard(folder: Path, entry: ShardEntry, dtype: np.dtype[Any]) -> Shard:
    # A file shorter than its index would read as zeros or end in a bus error only hours later.
    path, expected = folder / f"{entry.name}.bin", entry.tokens * dtype.itemsize
    if (size := path.stat().st_size) != expected:
        raise _damaged(folder, f"{path.name} has {size} bytes, its index says {expected}")
    starts_path = folder / f"{entry.name}.starts.npy"
    starts = np.load(starts_path, mmap_mode="r", allow_pickle=False)
    if starts.shape != (entry.documents,) or starts_path.stat().st_size != starts.offset + starts.nbytes:
        raise _damaged(folder, f"{starts_path.name} does not list {entry.documents} documents")
    tokens = np.memmap(path, dtype=dtype, mode="r")
    # Plain arrays on the same memory: numpy's memmap subclass costs more per call than a short read.
    return Shard(source=entry.source, tokens=tokens.view(np.ndarray), starts=starts.view(np.ndarray))


def _content_hash(index: dict[str, Any], entries: tuple[ShardEntry, ...], weights: tuple[float, ...]) -> str:
    """What training sees: tokens, ends, weights and ids; not where the text lay or what its files were called."""
    kept = [index["dtype"], index["vocabulary"], index["eot"], index["tokenizer_hash"], weights]
    kept += [(entry.split, entry.source, entry.sha256, entry.starts_sha256) for entry in entries]
    return sha256(json.dumps(kept).encode()).hexdigest()


def _save_starts(path: Path, starts: list[int]) -> str:
    file = path.open("wb")
    np.save(file, np.array(starts, dtype="<i8"), allow_pickle=False)
    _sync_and_close(file)
    return file_sha256(path)


def _sync_and_close(file: BinaryIO) -> None:
    with file:
        file.flush()
        os.fsync(file.fileno())


def _damaged(folder: Path, what: str) -> PlaitError:
    return PlaitError(
        f"the prepared data in {folder} are damaged ({what}); delete that folder and run `plait data` again"
    )
