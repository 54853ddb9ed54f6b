"""Token shards on disk, memory-mapped for training and evaluation; writer.py writes them once."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib.stride_tricks import as_strided

from plait.data.holdout import HoldoutSplit
from plait.errors import PlaitError

# Note [stream of a shard]: <eot> document <eot> document … document <eot>. Each document is preceded by the end of text
# and one more closes the stream, so over windows shifted by one every token and every end is a target exactly once, and
# a document's first token is predicted from <eot>. A document that outgrows a shard goes on in the next one as if it
# began there: one false end in SHARD_TOKENS. Where some tokens are never to be learned (a prompt, say), a mask beside
# the shard marks them with 1, one byte a token.

SHARD_FORMAT = 1
SHARD_TOKENS = 2**28


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """The smallest little-endian type that holds every id."""
    return np.dtype("<u2") if vocabulary <= 1 << 16 else np.dtype("<u4")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard's entry in the index: its number of documents and the SHA-256 of its files; no mask where every
    token is learned."""

    name: str
    split: HoldoutSplit
    source: int
    tokens: int
    documents: int
    sha256: str
    starts_sha256: str
    mask_sha256: str | None = None

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 of each file of the shard, by name."""
        found = {f"{self.name}.bin": self.sha256, f"{self.name}.starts.npy": self.starts_sha256}
        return found if self.mask_sha256 is None else {**found, f"{self.name}.mask.bin": self.mask_sha256}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A memory-mapped stream of tokens and the positions of the <eot> before each of its documents.

    `mask`, where there is one, is 1 at tokens that are never a target.
    """

    source: int
    tokens: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    mask: np.ndarray[Any, Any] | None = None

    def rows(self, starts: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
        """The `length` tokens from each of the given positions, one row per position."""
        return _rows(self.tokens, starts, length)

    def mask_rows(self, starts: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
        """The mask of the same rows; all 0 where the shard has no mask."""
        if self.mask is None:
            return np.zeros((len(starts), length), dtype=np.uint8)
        return _rows(self.mask, starts, length)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Prepared data; `weights` is empty where the sources are concatenated instead of mixed."""

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
        """Read all files and compare their hashes; raises PlaitError naming the first file that differs."""
        for entry in self.entries:
            for name, expected in entry.files.items():
                if file_sha256(self.folder / name) != expected:
                    raise _damaged(self.folder, f"{name} is not what was written")


def open_corpus(folder: Path) -> Corpus:
    """Memory-map a prepared corpus; raises PlaitError where a file's size disagrees with the index."""
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        if index["format"] != SHARD_FORMAT:
            raise _damaged(folder, f"index.json has format {index['format']}, this version reads {SHARD_FORMAT}")
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
    sync_and_close(file)


def sync_and_close(file: BinaryIO) -> None:
    """Close a file after its data have reached the disk."""
    with file:
        file.flush()
        os.fsync(file.fileno())


def _open_shard(folder: Path, entry: ShardEntry, dtype: np.dtype[Any]) -> Shard:
    starts_path = folder / f"{entry.name}.starts.npy"
    starts = np.load(starts_path, mmap_mode="r", allow_pickle=False)
    if starts.shape != (entry.documents,) or starts_path.stat().st_size != starts.offset + starts.nbytes:
        raise _damaged(folder, f"{starts_path.name} does not list {entry.documents} documents")
    return Shard(
        source=entry.source,
        tokens=_mapped(folder / f"{entry.name}.bin", entry.tokens, dtype),
        starts=starts.view(np.ndarray),
        mask=_mapped(folder / f"{entry.name}.mask.bin", entry.tokens, np.dtype("u1")) if entry.mask_sha256 else None,
    )


def _mapped(path: Path, numbers: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    # A file shorter than its index would read as zeros or end in a bus error only hours later.
    if (size := path.stat().st_size) != numbers * dtype.itemsize:
        raise _damaged(path.parent, f"{path.name} has {size} bytes, its index says {numbers * dtype.itemsize}")
    # A plain array on the same memory: numpy's memmap subclass costs more per call than a short read.
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def _rows(values: np.ndarray[Any, Any], starts: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
    step = values.itemsize
    return as_strided(values, (len(values) - length + 1, length), (step, step), writeable=False)[starts]


def _content_hash(index: dict[str, Any], entries: tuple[ShardEntry, ...], weights: tuple[float, ...]) -> str:
    """Hash of what training depends on: tokens, document ends, masks, weights and ids, but not the paths of the text
    or the names of files."""
    kept = [index["dtype"], index["vocabulary"], index["eot"], index["tokenizer_hash"], weights]
    kept += [(entry.split, entry.source, *entry.files.values()) for entry in entries]
    return sha256(json.dumps(kept).encode()).hexdigest()


def _damaged(folder: Path, what: str) -> PlaitError:
    return PlaitError(
        f"the prepared data in {folder} are damaged ({what}); delete that folder and run `plait data` again"
    )
