"""Writes token shards to disk while the tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np

from plait.data.holdout import HoldoutSplit
from plait.data.index import ShardEntry, file_sha256, sync_and_close

_COUNTED, _NEVER = np.zeros(1, dtype=np.uint8), np.ones(1, dtype=np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenShard:
    """How far a shard is: its tokens, where its documents begin, and the SHA-256 of what is in its files so far."""

    source: int
    tokens: int
    starts: tuple[int, ...]
    sha256: str
    mask_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterState:
    """How far a writer is: the shards that are whole, and the one that is open."""

    entries: tuple[ShardEntry, ...]
    open: OpenShard | None
    whole: bool
    """Whether it was given whole documents."""
    text_bytes: int
    bytes_written: int
    boundary_tokens: int = 0


class ShardWriter:
    """Writes one split as numbered shards; call `begin_document`, `add`, … and at the end `close_shard`.

    With `marks` "kept" it writes a mask beside each shard. Documents begin with `bos`, which is never a target, and end
    with `eot`; without `bos` the end of one is the beginning of the next. See Note [stream of a shard].
    """

    def __init__(
        self,
        folder: Path,
        split: HoldoutSplit,
        *,
        eot: int,
        dtype: np.dtype[Any],
        shard_tokens: int,
        marks: Literal["none", "kept"] = "none",
        bos: Sequence[int] = (),
    ) -> None:
        assert shard_tokens >= 8 + 4 * len(bos) and (marks == "kept" or not bos)
        self.entries: list[ShardEntry] = []
        self.bytes_written = self.text_bytes = 0
        self.boundary_tokens = 0
        """For the caller to count in: see CorpusIndex."""
        self._folder, self._dtype, self._limit = folder, dtype, shard_tokens
        self._split: HoldoutSplit = split
        self._eot, self._bos = np.array([eot], dtype=dtype), np.array(bos, dtype=dtype)
        self._marks = marks
        self._end = _COUNTED
        self._file: BinaryIO | None = None
        self._mask_file: BinaryIO | None = None
        self._source = self._tokens = 0

    def begin_document(self, source: int) -> None:
        """Start a document. A new shard is opened for a new source, and when at most an eighth of the current one is
        free, so that fewer documents are split."""
        if source != self._source or self._tokens + len(self._bos) >= self._limit - self._limit // 8:
            self.close_shard()
        if self._file is None:
            self._open(source)
        if len(self._bos) and self._starts:
            self._write(self._eot, _COUNTED)
        self._starts.append(self._tokens)
        if len(self._bos):
            self._write(self._bos, np.ones(len(self._bos), dtype=np.uint8))
        else:
            self._write(self._eot, _COUNTED)

    def add(self, ids: np.ndarray[Any, Any], mask: np.ndarray[Any, Any] | None = None) -> None:
        """Append tokens to the current document; `mask` is 1 at those that are never a target."""
        assert mask is None or (self._marks == "kept" and len(mask) == len(ids))
        mask = np.zeros(len(ids), dtype=np.uint8) if mask is None else mask
        while len(ids):
            room = self._limit - 1 - self._tokens  # the closing <eot> has its place reserved
            self._write(ids[:room], mask[:room])
            ids, mask = ids[room:], mask[room:]
            if len(ids):
                self.close_shard()
                self.begin_document(self._source)

    def add_whole(
        self, source: int, ids: np.ndarray[Any, Any], mask: np.ndarray[Any, Any], *, follow_tokens: int = 0
    ) -> None:
        """Append a document that has its own ends, or none, and is never divided over shards; `mask` is as for
        `add`. As many as `follow_tokens` of what comes next stand in the same shard."""
        assert self._marks == "kept" and len(mask) == len(ids)
        if source != self._source or self._tokens + len(ids) + follow_tokens >= self._limit:
            self.close_shard()
        self._end = _NEVER
        if self._file is None:
            self._open(source)
        self._starts.append(self._tokens)
        self._write(ids, mask)

    def close_shard(self) -> None:
        """End the shard with its last <eot> and wait until it is on disk; does nothing if no shard is open."""
        if self._file is None:
            return
        self._write(self._eot, self._end)
        sync_and_close(self._file)
        if self._mask_file is not None:
            sync_and_close(self._mask_file)
        self._file = self._mask_file = None
        starts_sha256 = _save_starts(self._folder / f"{self._name}.starts.npy", self._starts)
        entry = ShardEntry(
            name=self._name,
            split=self._split,
            source=self._source,
            tokens=self._tokens,
            documents=len(self._starts),
            sha256=self._hash.hexdigest(),
            starts_sha256=starts_sha256,
            mask_sha256=self._mask_hash.hexdigest() if self._marks == "kept" else None,
        )
        self.entries.append(entry)
        self._tokens = 0

    def state(self) -> WriterState:
        """How far it is; all of it is then in the kernel's hands, which keep it when this process is killed."""
        shard = None
        for file in (self._file, self._mask_file):
            if file is not None:
                file.flush()
        if self._file is not None:
            shard = OpenShard(
                source=self._source,
                tokens=self._tokens,
                starts=tuple(self._starts),
                sha256=self._hash.hexdigest(),
                mask_sha256=self._mask_hash.hexdigest(),
            )
        return WriterState(
            entries=tuple(self.entries),
            open=shard,
            whole=self._end is _NEVER,
            text_bytes=self.text_bytes,
            bytes_written=self.bytes_written,
            boundary_tokens=self.boundary_tokens,
        )

    def restore(self, state: WriterState) -> None:
        """Go on where a writer of the same folder was; raises ValueError or OSError where a file is not as it was
        then."""
        for entry in state.entries:
            if any(file_sha256(self._folder / name) != sha for name, sha in entry.files.items()):
                raise ValueError(f"{entry.name} is not what was written")
        self.entries, self.text_bytes, self.bytes_written = [*state.entries], state.text_bytes, state.bytes_written
        self.boundary_tokens = state.boundary_tokens
        self._end = _NEVER if state.whole else _COUNTED
        if (shard := state.open) is None:
            return
        self._open(shard.source, "continued")
        assert self._file is not None
        self._starts, self._tokens = list(shard.starts), shard.tokens
        _read_back(self._file, shard.tokens * self._dtype.itemsize, self._hash)
        if self._mask_file is not None:
            _read_back(self._mask_file, shard.tokens, self._mask_hash)
        if (self._hash.hexdigest(), self._mask_hash.hexdigest()) != (shard.sha256, shard.mask_sha256):
            raise ValueError(f"{self._name} is not what was written")

    def _open(self, source: int, how: Literal["new", "continued"] = "new") -> None:
        self._name = f"{self._split}-{len(self.entries):05d}"
        mode = "wb" if how == "new" else "r+b"
        self._file = cast("BinaryIO", (self._folder / f"{self._name}.bin").open(mode, buffering=1 << 20))
        if self._marks == "kept":
            self._mask_file = cast("BinaryIO", (self._folder / f"{self._name}.mask.bin").open(mode, buffering=1 << 20))
        self._source, self._starts, self._hash, self._mask_hash = source, [], sha256(), sha256()

    def _write(self, ids: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> None:
        assert self._file is not None
        data = np.ascontiguousarray(ids, dtype=self._dtype).data
        self._file.write(data)
        self._hash.update(data)
        if self._mask_file is not None:
            marks = np.ascontiguousarray(mask, dtype=np.uint8).data
            self._mask_file.write(marks)
            self._mask_hash.update(marks)
        self._tokens += len(ids)
        self.bytes_written += data.nbytes


def _read_back(file: BinaryIO, nbytes: int, digest: Any) -> None:
    """Hash the first this many bytes of a file that was opened to go on, and cut off what is behind them; raises
    ValueError where there are fewer."""
    left = nbytes
    while left:
        block = file.read(min(1 << 20, left))
        if not block:
            raise ValueError("it is shorter than what was written")
        digest.update(block)
        left -= len(block)
    file.truncate(nbytes)
    file.seek(nbytes)


def _save_starts(path: Path, starts: list[int]) -> str:
    file = path.open("wb")
    np.save(file, np.array(starts, dtype="<i8"), allow_pickle=False)
    sync_and_close(file)
    return file_sha256(path)
