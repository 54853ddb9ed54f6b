"""Brings a rank's part of a checkpoint to host 0, if the rank's folder is on another host: from its disk, or from its
host's memory if the disk is full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

from plait.checkpoint.host_bytes import host_bytes
from plait.checkpoint.manifest import parts_text, sort_parts
from plait.checkpoint.transfer import TensorSlice, rank_layout
from plait.launch.values.copies import OUTBOX, CopyStore
from plait.machines.machine import free_memory_bytes

MEMORY_KEPT = 0.25
"""Share of the free memory that copies may not take."""
Slices = Mapping[str, Sequence[TensorSlice]]


class PartsCarrier:
    """Requests the transfer of parts from ranks whose folder is not on rank 0's host; the supervisors fetch them.
    `sharers` ranks share this host's memory, and `lineage` is as in KeptCopy."""

    def __init__(
        self,
        tell: Callable[..., None],
        store: CopyStore | None,
        *,
        rank: int,
        local_rank: int,
        sharers: int,
        lineage: int,
    ) -> None:
        self._tell, self._store, self._lineage = tell, store, lineage
        self._rank, self._local_rank, self._sharers = rank, local_rank, sharers
        self._step = self._nbytes = 0

    def send(self, staging: Path, kept: Literal["disk", "memory"]) -> None:
        """Request the transfer of this rank's part; returns before it has arrived."""
        in_memory = {"memory": {"local_rank": self._local_rank, "step": self._step}} if kept == "memory" else {}
        self._tell("wrote", staging=staging.name, **in_memory)

    def put_in_memory(self, slices: Slices, step: int) -> None:
        """Keep the part in memory if the disk is full; raises OSError or MemoryError."""
        if self._store is None:
            raise MemoryError("no process keeps memory for this rank")
        self._step = step
        header, parts, local = rank_layout(self._rank, slices)
        nbytes = len(header) + sum(part.nbytes for part in parts)
        if nbytes > (1 - MEMORY_KEPT) * free_memory_bytes() / self._sharers:
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

    def cannot_send(self, staging: Path, why: str) -> None:
        """Report that this host has no room for the part, on disk or in memory."""
        self._tell("no room", staging=staging.name, why=why)

    def clear(self) -> None:
        """Called when the save is over."""
        if self._nbytes and self._store is not None:
            self._store.release(OUTBOX, self._nbytes)
            self._nbytes = 0
