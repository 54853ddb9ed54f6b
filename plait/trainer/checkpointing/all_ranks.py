"""What all ranks learn of each other, and an act that succeeds on all of them or fails on all, with one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from plait.errors import PlaitError, RunFailed
from plait.parallel.sums import Sums

_SENTENCE_BYTES = 2_000


def agree_on_any(world: Sums, own: bool) -> bool:
    """Whether `own` is true of any rank, the same answer on all. Every rank must call it."""
    return bool(world.largest(torch.tensor([int(own)]))[0])


def run_on_all_ranks(
    world: Sums, act: Callable[[], None], clear: Path | None, number: Callable[[], int] = lambda: 0
) -> int:
    """Call `act` on every rank; if it fails on any of them, all ranks raise RunFailed with the same message. Returns
    the largest `number` of all ranks, asked for after `act`.

    Every rank must raise it, because no rank knows whose error will be shown. Then the folder `clear` is deleted, on
    the ranks that pass one.
    """
    sentence = b""
    try:
        act()
    except PlaitError as error:
        # The first to fail takes the folder away under the others, who then miss their files: they are heard last.
        order = b"2" if isinstance(error.__cause__, FileNotFoundError) else b"1"
        sentence = (order + str(error).encode())[:_SENTENCE_BYTES]
    longest, largest = world.largest(torch.tensor([len(sentence), 0 if sentence else number()])).tolist()
    if not longest:
        return int(largest)
    if clear is not None:  # now that nobody writes into it any more
        shutil.rmtree(clear, ignore_errors=True)
    padded = torch.tensor(list(sentence.ljust(_SENTENCE_BYTES, b"\0")), dtype=torch.uint8)
    texts = [bytes(part.tolist()).rstrip(b"\0").decode(errors="ignore") for part in world.gather(padded)]
    raise RunFailed(min((text for text in texts if text), key=lambda text: text[0])[1:])
