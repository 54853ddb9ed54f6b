"""How far the making of a corpus has come, kept beside its shards: one that was killed goes on from there, and makes
the same shards."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from plait.checked_json import parse_object, sealed_text, typed_value
from plait.data.holdout import HoldoutSplit
from plait.data.index import NOTHING_COUNTED, RecordCounts
from plait.data.preparation.tokens import Tokenizer, load_tokenizer
from plait.data.preparation.writer import ShardWriter, WriterState
from plait.errors import PlaitError
from plait.regular_file import read_regular_file

KEEP_EVERY_BYTES = 1 << 26
"""Bytes of text between two saves: some seconds of tokenizing, milliseconds of saving."""
_FILE = "kept.json"
Writers = Mapping[HoldoutSplit, ShardWriter]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptProgress:
    """This many pieces of text, or examples, of this many bytes are in the shards; `tokenizer` is the hash of the one
    that lies beside them."""

    format: Literal[1] = 1
    tokenizer: str
    pieces: int
    done_bytes: int
    writers: Mapping[HoldoutSplit, WriterState]
    counts: RecordCounts = NOTHING_COUNTED
    """Counts made while records were written."""


class ProgressKeeper:
    """Keeps the progress of one making of a corpus in its folder, every this many bytes of text."""

    def __init__(self, folder: Path, every_bytes: int = KEEP_EVERY_BYTES) -> None:
        self._folder, self._every_bytes = folder, every_bytes
        self._kept = _read(folder)
        self._tokenizer_hash, self._kept_bytes = "", 0
        self.counts = NOTHING_COUNTED
        """The stored counts that were made while records were written."""

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that was trained before, if this goes on."""
        if self._kept is None:
            return None
        with suppress(PlaitError):
            tokenizer = load_tokenizer(self._folder)
            if tokenizer.hash == self._kept.tokenizer:
                return tokenizer
        self._forget()
        return None

    def begin(self, tokenizer: Tokenizer, new_writers: Callable[[], Writers]) -> tuple[Writers, int, int]:
        """Writers that continue where they were before, with the pieces and bytes that are written; new ones and zeros
        where nothing usable was kept. What is damaged is made again."""
        kept = self._kept if self._kept is not None and self._kept.tokenizer == tokenizer.hash else None
        writers = new_writers()
        try:
            for split, writer in writers.items():
                if kept is not None:
                    writer.restore(kept.writers[split])
        except (OSError, ValueError, KeyError):
            kept, writers = None, new_writers()
        if kept is None:
            self._forget()
            tokenizer.save(self._folder)
        self._tokenizer_hash = tokenizer.hash
        pieces, done_bytes = (kept.pieces, kept.done_bytes) if kept else (0, 0)
        self.counts = kept.counts if kept else NOTHING_COUNTED
        self._keep(pieces, done_bytes, writers)
        return writers, pieces, done_bytes

    def written(self, pieces: int, done_bytes: int, writers: Writers) -> None:
        """Take note that this many are written; keeps that from time to time."""
        if done_bytes - self._kept_bytes >= self._every_bytes:
            self._keep(pieces, done_bytes, writers)

    def finish(self) -> None:
        """Take the note away: the corpus is whole."""
        (self._folder / _FILE).unlink()

    def _keep(self, pieces: int, done_bytes: int, writers: Writers) -> None:
        state = KeptProgress(
            tokenizer=self._tokenizer_hash,
            pieces=pieces,
            done_bytes=done_bytes,
            writers={split: writer.state() for split, writer in writers.items()},
            counts=self.counts,
        )
        aside = self._folder / f".{_FILE}"
        aside.write_text(sealed_text(asdict(state)), encoding="utf-8")
        aside.rename(self._folder / _FILE)
        self._kept_bytes = done_bytes

    def _forget(self) -> None:
        self._kept = None
        for path in self._folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def has_kept_progress(folder: Path) -> bool:
    """Whether the making of a corpus in this folder can go on."""
    return not folder.is_symlink() and (folder / _FILE).is_file()


def _read(folder: Path) -> KeptProgress | None:
    try:
        return typed_value(KeptProgress, parse_object(read_regular_file(folder / _FILE)))
    except (OSError, ValueError):
        return None
