"""A rank's part of a checkpoint in its host's memory, for host 0 to fetch where this host's disk has no room for it."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from plait.checkpoint.host_bytes import host_bytes
from plait.checkpoint.manifest import parts_text, sort_parts
from plait.checkpoint.transfer import rank_layout
from plait.launch.values.copies import OUTBOX, CopyStore
from plait.trainer.checkpointing.in_memory import Slices


class Outbox:
    """The slot that holds the part in the memory of this host's agent; `lineage` is as in KeptCopy."""

    def __init__(self, store: CopyStore, rank: int, lineage: int) -> None:
        self._store, self._rank, self._lineage = store, rank, lineage
        self._nbytes = 0

    def put(self, slices: Slices, step: int, free_bytes: float) -> None:
        """Put this rank's file of a checkpoint there, and its list; raises OSError or MemoryError where there
        is no memory for it: this rank may take `free_bytes`."""
        header, parts, local = rank_layout(self._rank, slices)
        nbytes = len(header) + sum(part.nbytes for part in parts)
        if nbytes > free_bytes:
            raise MemoryError(f"{nbytes} bytes")
        self._store.begin(OUTBOX)
        self._store.reserve(OUTBOX, nbytes)
        self._nbytes = nbytes
        self._store.write(OUTBOX, 0, memoryview(header))
        written = []
        for part in parts:
            at, digest = part.begin, sha256()
            for piece in host_bytes(local[part.key]):
                self._store.write(OUTBOX, at, piece)
                digest.update(piece)
                at += len(piece)
            written.append(replace(part, sha256=digest.hexdigest()))
        text = parts_text(sort_parts(written)).encode()
        self._store.finish(OUTBOX, step=step, lineage=self._lineage, text=text, data_bytes=nbytes)

    def clear(self) -> None:
        """Give the memory back, if any was taken."""
        if self._nbytes:
            self._store.release(OUTBOX, self._nbytes)
            self._nbytes = 0
