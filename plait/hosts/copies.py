"""What the memory of the hosts of a run holds of their ranks' state: host 0 asks, each joined host replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.errors import PlaitError
from plait.hosts.membership import Member
from plait.hosts.protocol import Handlers, ReadReply, Reply, RequestKind
from plait.hosts.wire import BLOB_BYTES_AT_MOST
from plait.launch.in_memory.memory import OutboxFile
from plait.launch.local.run import ForkServer
from plait.launch.values.job import RANKS_AT_MOST


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesQuestion:
    """For which steps of this lineage do you hold whole copies of the state of all your ranks?"""

    ranks: int
    lineage: int

    def __post_init__(self) -> None:
        if not 0 <= self.ranks <= RANKS_AT_MOST:
            raise ValueError(f"{self.ranks} ranks on one host")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesReply:
    """The steps of these copies."""

    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxQuestion:
    """Some bytes of one of the files of a rank's part of a checkpoint, which its host keeps in memory."""

    local_rank: int
    step: int
    what: OutboxFile
    offset: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.local_rank < RANKS_AT_MOST or min(self.offset, self.bytes) < 0:
            raise ValueError("no rank, or no place in a file")


LIST_COPIES = RequestKind(name="copies", question=CopiesQuestion, reply=CopiesReply)
READ_OUTBOX = RequestKind(name="outbox", question=OutboxQuestion, reply=ReadReply, reply_blob_bytes=BLOB_BYTES_AT_MOST)


def memory_handlers(server: ForkServer) -> Handlers:
    """A joined host's replies about what its memory holds of its ranks' state."""

    def copies(asked: CopiesQuestion, blob: bytes) -> Reply[CopiesReply]:
        return Reply(values=CopiesReply(steps=tuple(server.whole_steps(asked.ranks, asked.lineage))))

    def outbox(asked: OutboxQuestion, blob: bytes) -> Reply[ReadReply]:
        wanted = min(asked.bytes, BLOB_BYTES_AT_MOST)
        found = server.outbox(asked.local_rank, asked.step, asked.what, asked.offset, wanted)
        if found is None:
            raise PlaitError(f"no part of step {asked.step} is kept in memory; give the same command again")
        return Reply(values=ReadReply(size=found[0]), blob=found[1])

    return {LIST_COPIES: copies, READ_OUTBOX: outbox}


def copied_steps(own: ForkServer, members: Sequence[Member], ranks: Sequence[int], lineage: int) -> Sequence[int]:
    """The steps of which all ranks of all hosts, this many on each, have left whole copies of their state, of this
    lineage, on their hosts, the newest first; none where a host is lost. Between jobs; blocks."""
    here, *others = ranks
    kept = [set(own.whole_steps(here, lineage))] if here else []
    for member, count in zip(members, others, strict=True):
        if not count:
            continue
        try:
            kept.append(set(member.ask(LIST_COPIES, CopiesQuestion(ranks=count, lineage=lineage)).values.steps))
        except PlaitError:
            return ()
    return sorted(set.intersection(*kept), reverse=True) if kept else ()
