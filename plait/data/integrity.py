"""Compares prepared data with the hashes of what was written: at a start what is read quickly, the rest during a
run."""

from __future__ import annotations

import threading
import time
from hashlib import sha256
from pathlib import Path

from plait.data.index import damaged
from plait.data.shards import Corpus
from plait.errors import PlaitError, RunFailed
from plait.regular_file import open_regular_file

AT_START_BYTES = 1 << 28
"""The most bytes to hash before each start: about half a second's worth."""
_BLOCK_BYTES = 1 << 22
_RESTS = 9
"""The background check rests for this many times the time that it worked: a tenth of one core."""


def verify_at_start(corpus: Corpus, limit_bytes: int = AT_START_BYTES) -> None:
    """Compare the hashes of the held-out shards and of the training shards, each split only where its files have at
    most `limit_bytes`; raises PlaitError naming the first file that differs."""
    for split in ("heldout", "train"):
        if sum(path.stat().st_size for path, _ in corpus.files(split)) <= limit_bytes:
            corpus.verify(split)


class BackgroundVerification:
    """Compares the hashes of all files of a corpus in a thread, slowly, while a run uses them; held-out shards come
    first."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._stop = threading.Event()
        self._damage: PlaitError | None = None
        self._thread = threading.Thread(target=self._verify, name="verify data", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, whether it has read everything or not."""
        self._stop.set()
        self._thread.join()

    def wait(self) -> None:
        """Block until every file was read, or one was found damaged."""
        self._thread.join()

    def raise_if_damaged(self) -> None:
        """Raises RunFailed naming a damaged file that was found so far."""
        if self._damage:
            raise RunFailed(str(self._damage))

    def _verify(self) -> None:
        for path, expected in [*self._corpus.files("heldout"), *self._corpus.files("train")]:
            try:
                is_damaged = self._hash(path) not in (None, expected)
            except OSError as error:
                self._damage = damaged(self._corpus.folder, f"{path.name} cannot be read: {error.strerror}")
                return
            if is_damaged:
                self._damage = damaged(self._corpus.folder, f"{path.name} is not what was written")
                return

    def _hash(self, path: Path) -> str | None:
        """The SHA-256 of a file, read with rests; None where it was stopped."""
        state = sha256()
        with open_regular_file(path, buffering=0) as file:
            while True:
                began = time.perf_counter()
                block = file.read(_BLOCK_BYTES)
                state.update(block)
                if not block:
                    return state.hexdigest()
                if self._stop.wait(_RESTS * (time.perf_counter() - began)):
                    return None
