"""What the memory of the hosts of a run holds of their ranks' state: host 0 asks, each agent replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from plait.errors import PlaitError
from plait.launch.in_memory.memory import OutboxFile
from plait.launch.local.run import ForkServer
from plait.launch.remote.leader import Member
from plait.launch.remote.link import Handler, Reply
from plait.launch.remote.messages import CopiesAnswer, CopiesQuestion, parse_message
from plait.launch.remote.wire import Frame
from plait.launch.values.job import RANKS_AT_MOST

OUTBOX_KIND = "outbox"
_KIND = "copies"
_BLOCK_BYTES_AT_MOST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxQuestion:
    """Some bytes of one of the files of a rank's part of a checkpoint, which its host keeps in memory."""

    local_rank: int
    step: int
    what: OutboxFile
    offset: int
    bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.local_rank < RANKS_AT_MOST or min(self.offset, self.bytes) < 0:
            raise ValueError("no rank, or no place in a file")


def copied_steps(own: ForkServer, members: Sequence[Member], ranks: Sequence[int], lineage: int) -> Sequence[int]:
    """The steps of which all ranks of all hosts, this many on each, have left whole copies of their state, of this
    lineage, on their hosts, the newest first; none where a host is lost. Between jobs; blocks."""
    here, *others = ranks
    kept = [set(own.whole_steps(here, lineage))] if here else []
    for member, count in zip(members, others, strict=True):
        if not count:
            continue
        try:
            answer = member.ask(_KIND, asdict(CopiesQuestion(ranks=count, lineage=lineage)))
            kept.append(set(parse_message(CopiesAnswer, answer.values).steps))
        except PlaitError:
            return ()
    return sorted(set.intersection(*kept), reverse=True) if kept else ()


def copies_handlers(server: ForkServer) -> Mapping[str, Handler]:
    """An agent's replies to host 0's questions."""

    def answer(frame: Frame) -> Reply:
        asked = parse_message(CopiesQuestion, frame.values)
        return Reply(values={"steps": list(server.whole_steps(asked.ranks, asked.lineage))})

    def outbox(frame: Frame) -> Reply:
        asked = parse_message(OutboxQuestion, frame.values)
        wanted = min(asked.bytes, _BLOCK_BYTES_AT_MOST)
        found = server.outbox(asked.local_rank, asked.step, asked.what, asked.offset, wanted)
        if found is None:
            raise PlaitError(f"no part of step {asked.step} is kept in memory; give the same command again")
        return Reply(values={"size": found[0]}, blob=found[1])

    return {_KIND: answer, OUTBOX_KIND: outbox}
