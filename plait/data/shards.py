"""Token shards on disk, memory-mapped for training and evaluation; writer.py writes them once."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from plait.data.holdout import HoldoutSplit
from plait.data.index import (
    NOTHING_COUNTED,
    RecordCounts,
    SampleLayout,
    ShardEntry,
    SourceEntry,
    damaged,
    file_sha256,
    read_index,
)
from plait.regular_file import open_regular_file

# Note [stream of a shard]: <eot> document <eot> document … document <eot>. Each document is preceded by the end of text
# and one more closes the stream, so over windows shifted by one every token and every end is a target exactly once, and
# a document's first token is predicted from <eot>. A document that outgrows a shard goes on in the next one as if it
# began there: one false end in SHARD_TOKENS. Where the tokenizer begins texts with a token of its own (BOS), the stream
# is <bos> document <eot> <bos> document <eot>, and the mask keeps each <bos> from being a target. Where some tokens are
# never to be learned (a prompt, say), a mask beside the shard marks them with 1, one byte a token. In a corpus of whole
# examples (layout "whole") an example is all tokens from its start to the next one's, with the ends of text that it has
# itself; its first token is marked, as nothing stands before it, and so is the <eot> that closes the shard. Of pairs
# (layout "pairs") documents 2i and 2i + 1 are the chosen and the rejected example of one, in the same shard.

SHARD_TOKENS = 2**28
_MOST_STARTS_CHECKED = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A memory-mapped stream of tokens and the positions of the <eot>, or <bos>, before each of its documents.

    `mask`, where there is one, is 1 at tokens that are never a target. `name` is that of its files.
    """

    source: int
    tokens: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    mask: np.ndarray[Any, Any] | None = None
    name: str = ""

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
    sources: tuple[SourceEntry, ...]
    content_hash: str
    entries: tuple[ShardEntry, ...]
    tokenizer_hash: str = ""
    layout: SampleLayout = "stream"
    template: str = ""
    """The place of the chat template; empty if no conversation was read."""
    counts: RecordCounts = NOTHING_COUNTED
    """Counts of the records that it was made from, by outcome."""
    bos: tuple[int, ...] = ()
    """Ids that each document and prompt begins with, as its tokenizer begins a text; empty: with `eot`."""
    boundary_tokens: int = 0
    """Of a stream, the cuts of long text that may have divided a token; of examples, the completions whose first
    characters are in a token of their prompt's end."""
    left_out: tuple[str, ...] = ()
    """Files of the recipe that were not read and why, as they were found when this run looked for its text."""

    @property
    def train_tokens(self) -> int:
        return sum(len(shard.tokens) for shard in self.train)

    @property
    def heldout_tokens(self) -> int:
        return sum(len(shard.tokens) for shard in self.heldout)

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    def files(self, split: HoldoutSplit | None = None) -> list[tuple[Path, str]]:
        """Path and SHA-256 of each file of the shards, or of those of one split."""
        kept = (entry for entry in self.entries if split in (None, entry.split))
        return [(self.folder / name, expected) for entry in kept for name, expected in entry.files.items()]

    def verify(self, split: HoldoutSplit | None = None) -> None:
        """Read all files, or those of one split, and compare their hashes; raises PlaitError naming the first file
        that differs."""
        for path, expected in self.files(split):
            if file_sha256(path) != expected:
                raise damaged(self.folder, f"{path.name} is not what was written")


def open_corpus(folder: Path) -> Corpus:
    """Memory-map a prepared corpus; raises PlaitError where the index is damaged, or a file's size or header disagrees
    with it."""
    index = read_index(folder)
    dtype = np.dtype(index.dtype)
    try:
        shards = [(entry.split, _open_shard(folder, entry, dtype)) for entry in index.shards]
    except OSError as error:
        name = Path(error.filename).name if error.filename else "a file"
        raise damaged(folder, f"{name} cannot be read: {error.strerror}") from None
    return Corpus(
        folder=folder,
        vocabulary=index.vocabulary,
        eot=index.eot,
        dtype=dtype,
        train=tuple(shard for split, shard in shards if split == "train"),
        heldout=tuple(shard for split, shard in shards if split == "heldout"),
        train_bytes=index.train_bytes,
        heldout_bytes=index.heldout_bytes,
        weights=index.weights,
        sources=index.sources,
        content_hash=index.content_hash(),
        entries=index.shards,
        tokenizer_hash=index.tokenizer_hash,
        layout=index.layout,
        template=index.template,
        counts=index.counts,
        bos=index.bos,
        boundary_tokens=index.boundary_tokens,
    )


def _open_shard(folder: Path, entry: ShardEntry, dtype: np.dtype[Any]) -> Shard:
    starts = _mapped_starts(folder, entry)
    return Shard(
        name=entry.name,
        source=entry.source,
        tokens=_mapped(folder / f"{entry.name}.bin", entry.tokens, dtype),
        starts=starts,
        mask=_mapped(folder / f"{entry.name}.mask.bin", entry.tokens, np.dtype("u1")) if entry.mask_sha256 else None,
    )


def _mapped_starts(folder: Path, entry: ShardEntry) -> np.ndarray[Any, Any]:
    """The positions at which documents begin. The header is compared and never interpreted: numpy reads one as Python's
    source, and whatever that can raise would come out."""
    path, header = folder / f"{entry.name}.starts.npy", _starts_header(entry.documents)
    with open_regular_file(path) as file:
        found = file.read(len(header))
    if found != header or path.stat().st_size != len(header) + 8 * entry.documents:
        raise damaged(folder, f"{path.name} does not list {entry.documents} documents")
    starts = np.memmap(path, dtype="<i8", mode="r", offset=len(header), shape=(entry.documents,))
    if not _are_starts(starts, entry.tokens):
        raise damaged(folder, f"{path.name} is not what was written")
    return starts.view(np.ndarray)


def _starts_header(documents: int) -> bytes:
    """The header that `np.save` writes before this many 64-bit numbers."""
    header = io.BytesIO()
    values = {"descr": "<i8", "fortran_order": False, "shape": (documents,)}
    np.lib.format.write_array_header_1_0(header, values)
    return header.getvalue()


def _are_starts(starts: np.ndarray[Any, Any], tokens: int) -> bool:
    """Whether these are ascending positions in a shard; of very many only the first and the last are looked at."""
    ascending = len(starts) > _MOST_STARTS_CHECKED or bool(np.all(np.diff(starts) > 0))
    return starts[0] == 0 and starts[-1] < tokens and ascending


def _mapped(path: Path, numbers: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    # A file shorter than its index would read as zeros or end in a bus error only hours later.
    if (size := path.stat().st_size) != numbers * dtype.itemsize:
        raise damaged(path.parent, f"{path.name} has {size} bytes, its index says {numbers * dtype.itemsize}")
    # A plain array on the same memory: numpy's memmap subclass costs more per call than a short read.
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def _rows(values: np.ndarray[Any, Any], starts: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
    step = values.itemsize
    return as_strided(values, (len(values) - length + 1, length), (step, step), writeable=False)[starts]
