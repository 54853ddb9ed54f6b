"""A rank's view of the memory in which its host's supervisor or agent keeps copies of the ranks' state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

SLOTS = 3
"""Copies of each rank: the newest whole one, one that is being made, and one that a save reads."""
OUTBOX = SLOTS
"""One more slot, which holds no copy: a rank's part of a checkpoint, where its host's disk has no room for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCopy:
    """A whole copy of one rank's state: after which step, in which slot, and how many bytes of text and of data.

    `lineage` is the number of the start from whose beginning the run has come here without a checkpoint read since.
    """

    step: int
    lineage: int
    slot: int
    text_bytes: int
    data_bytes: int


CopyPart = Literal["tensors", "list"]
"""The contents of a slot: the bytes of tensors as in a rank's checkpoint file, and the text that lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadableCopy:
    """A rank's whole copy of its state, on whichever host, for a process that outlived the rank.

    `read` gives the size of one of its two files and, from an offset on, some of its bytes; raises PlaitError.
    """

    rank: int
    read: Callable[[CopyPart, int, int], tuple[int, bytes]]


CopiesByStep = Mapping[int, Sequence[ReadableCopy]]
"""Copies of a state by its step."""


class CopyStore(Protocol):
    """A rank's access to that memory: it writes its own copies, and reads those of all ranks of its host by their local
    number. What it holds outlives the rank, and is gone with the supervisor or agent."""

    def reserve(self, slot: int, nbytes: int) -> None:
        """Take the memory for a copy of this many bytes of data; raises OSError where there is none."""
        ...

    def begin(self, slot: int) -> None:
        """Mark the slot's contents as not being a copy any more."""
        ...

    def write(self, slot: int, offset: int, data: memoryview) -> None:
        """Put bytes of a copy's data in their place; raises OSError where there is no memory for them."""
        ...

    def finish(self, slot: int, *, step: int, lineage: int, text: bytes, data_bytes: int) -> None:
        """The slot holds a whole copy from now on, whose parts the text describes."""
        ...

    def release(self, slot: int, nbytes: int) -> None:
        """Give this many bytes of a slot back: it holds nothing any more."""
        ...

    def copies(self, local_rank: int) -> Sequence[KeptCopy]:
        """The whole copies of a rank, the newest first."""
        ...

    def text(self, local_rank: int, copy: KeptCopy) -> bytes:
        """The text of a copy."""
        ...

    def data(self, local_rank: int, copy: KeptCopy) -> memoryview:
        """The data of a copy, mapped and not copied; writes to it are private."""
        ...
