"""Which copies of ranks' state the hosts of a run hold: host 0 asks, each agent replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from plait.errors import PlaitError
from plait.launch.local.run import ForkServer
from plait.launch.remote.leader import Member
from plait.launch.remote.link import Handler, Reply
from plait.launch.remote.messages import CopiesAnswer, CopiesQuestion, parse_message
from plait.launch.remote.wire import Frame

_KIND = "copies"


def copied_steps(own: ForkServer, members: Sequence[Member], ranks: Sequence[int], lineage: int) -> Sequence[int]:
    """The steps of which all ranks of all hosts, so many on each, have left whole copies of their state, of this
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
    """An agent's reply to host 0's question."""

    def answer(frame: Frame) -> Reply:
        asked = parse_message(CopiesQuestion, frame.values)
        return Reply(values={"steps": list(server.whole_steps(asked.ranks, asked.lineage))})

    return {_KIND: answer}
