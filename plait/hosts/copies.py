"""What the memory of the hosts of a run holds of their ranks' state: host 0 asks, each joined host replies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from plait.errors import PlaitError
from plait.hosts.membership import Member
from plait.hosts.protocol import Handlers, ReadReply, Reply, RequestKind
from plait.hosts.wire import BLOB_BYTES_AT_MOST
from plait.launch.local.run import ForkServer
from plait.launch.values.copies import CopiesByStep, CopyPart, ReadableCopy
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
class KeptQuestion:
    """Some bytes of a rank's copy of its state, or with no lineage of its part of a checkpoint, which its host keeps in
    memory."""

    local_rank: int
    step: int
    what: CopyPart
    lineage: int | None = None
    offset: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.local_rank < RANKS_AT_MOST or min(self.offset, self.bytes) < 0:
            raise ValueError("no rank, or no place in a file")


LIST_COPIES = RequestKind(name="copies", question=CopiesQuestion, reply=CopiesReply)
READ_KEPT = RequestKind(name="kept", question=KeptQuestion, reply=ReadReply, reply_blob_bytes=BLOB_BYTES_AT_MOST)


def memory_handlers(server: ForkServer) -> Handlers:
    """A joined host's replies about what its memory holds of its ranks' state."""

    def copies(asked: CopiesQuestion, blob: bytes) -> Reply[CopiesReply]:
        return Reply(values=CopiesReply(steps=tuple(server.whole_steps(asked.ranks, asked.lineage))))

    def kept(asked: KeptQuestion, blob: bytes) -> Reply[ReadReply]:
        wanted = min(asked.bytes, BLOB_BYTES_AT_MOST)
        found = server.kept(asked.local_rank, asked.step, asked.lineage, asked.what, asked.offset, wanted)
        if found is None:
            raise PlaitError(f"no part of step {asked.step} is kept in memory; give the same command again")
        return Reply(values=ReadReply(size=found[0]), blob=found[1])

    return {LIST_COPIES: copies, READ_KEPT: kept}


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


def surviving_copies(own: ForkServer, members: Sequence[Member], ranks: Sequence[int], lineage: int) -> CopiesByStep:
    """The whole copies of this lineage that the hosts which are left hold of their ranks, this many on each host, by
    step, the newest first. Between jobs; blocks."""
    here, *others = ranks
    found: dict[int, list[ReadableCopy]] = {step: [*some] for step, some in own.copies(range(here), lineage).items()}
    first = here
    for member, count in zip(members, others, strict=True):
        if count:
            with suppress(PlaitError):  # it is lost
                asked = CopiesQuestion(ranks=count, lineage=lineage)
                for step in member.ask(LIST_COPIES, asked).values.steps:
                    some = [_copy_of(member, first + place, place, step, lineage) for place in range(count)]
                    found.setdefault(step, []).extend(some)
        first += count
    return {step: found[step] for step in sorted(found, reverse=True)}


def _copy_of(member: Member, rank: int, place: int, step: int, lineage: int) -> ReadableCopy:
    def read(what: CopyPart, offset: int, nbytes: int) -> tuple[int, bytes]:
        wanted = min(nbytes, BLOB_BYTES_AT_MOST)
        asked = KeptQuestion(local_rank=place, step=step, what=what, lineage=lineage, offset=offset, bytes=wanted)
        answer = member.ask(READ_KEPT, asked)
        return answer.values.size, answer.blob

    return ReadableCopy(rank=rank, read=read)
