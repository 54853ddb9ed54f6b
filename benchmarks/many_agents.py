"""`python -m benchmarks.many_agents`: the control plane alone, with many hosts: they join, one dies, all are told.

Agents are processes of this machine without torch, forked from one parent; each joins by an address of its own
(127.1.0.1, …), and runs one rank that waits. Measured are the seconds from the first fork until host 0 has admitted
all, until each has reached others by ports of their own choice, until all ranks run; and, once one agent was killed,
until the last of the others has been told of it, by its own clock (one machine, one clock). Kept in
results/many-agents-DATE.json.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import signal
import struct
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial

from plait.checked_json import typed_value
from plait.errors import PlaitError, RunFailed
from plait.hosts.connectivity import ConnectivityListener, check_connectivity
from plait.hosts.handshake import Secret, new_secret
from plait.hosts.joining import HostInfo, listener_at, own_host_info
from plait.hosts.leader import HostPart, Hosts
from plait.hosts.member import LeaderNotReached, connect, serve
from plait.hosts.wire import Wire
from plait.launch.values.entries import EntryTable
from plait.launch.values.job import Job, Message

ENTRIES = EntryTable(functions={"wait": "benchmarks.many_agents_rank:wait"})
JOIN_BAR_S, TOLD_BAR_S = 10.0, 1.0
ROUNDS = 5
START_AT_LATEST_S = 300.0
_LEADER = "127.0.0.1"
_TIME = struct.Struct("d")
_NICER = 10
"""Agents are machines of their own in life, and take no time from host 0: here they give way to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlaneTimes:
    """Seconds of one round; `told_s` are those of each agent that lived on, in the order of the agents."""

    joined_s: float
    reached_s: float
    running_s: float
    ended_s: float
    """From the death until host 0 had heard of the end of all ranks, and all had left."""
    told_s: tuple[float, ...]
    torch_in_agents: bool


class Board:
    """Moments that the agents write and their parent reads: one number each, in memory that they share."""

    def __init__(self, agents: int) -> None:
        self._memory = mmap.mmap(-1, _TIME.size * agents)

    def note(self, agent: int, at_s: float) -> None:
        _TIME.pack_into(self._memory, _TIME.size * agent, at_s)

    def read(self, agent: int) -> float:
        return _TIME.unpack_from(self._memory, _TIME.size * agent)[0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_agents")
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    flags = parser.parse_args()
    rounds = [one_round(flags.agents) for _ in range(flags.rounds)]
    print("| round | all joined | all reach each other | all ranks run | last told of a death | all have left |")
    print("| --- | --- | --- | --- | --- | --- |")
    for number, one in enumerate(rounds, 1):
        moments = f"{one.joined_s:.2f} s | {one.reached_s:.2f} s | {one.running_s:.2f} s"
        print(f"| {number} | {moments} | {max(one.told_s):.3f} s | {one.ended_s:.2f} s |")
    met = all(one.joined_s <= JOIN_BAR_S and max(one.told_s) <= TOLD_BAR_S for one in rounds)
    from benchmarks.machine import describe  # imports torch, and the agents were forked before
    from benchmarks.pairing import save

    bars = {"join_s": JOIN_BAR_S, "told_s": TOLD_BAR_S}
    path = save(
        "many-agents",
        {"machine": describe(), "agents": flags.agents, "bars": bars, "rounds": [asdict(one) for one in rounds]},
    )
    print(
        f"\nbars: {JOIN_BAR_S:g} s to join, {TOLD_BAR_S:g} s to be told: {'met' if met else 'missed'}; written to "
        f"{path}"
    )
    return int(not met)


def one_round(agents: int) -> ControlPlaneTimes:
    """Fork the agents, have them join, run a rank on each, kill one."""
    secret, board, port = new_secret(), Board(agents), _free_port()
    own_host_info()  # so that not every agent reads all of plait for its hash
    began_s = time.monotonic()
    pids = [_forked_agent(number, port, secret, board) for number in range(agents)]
    try:
        times, killed, killed_at_s = _lead(agents, port, secret, pids, began_s)
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    finally:
        for pid in pids:
            _kill(pid)
    told = tuple(board.read(agent) - killed_at_s for agent in range(agents) if agent != killed)
    wrong = [agent for agent, code in enumerate(ends) if code != (-signal.SIGKILL if agent == killed else 0)]
    if wrong or min(told) <= 0:
        raise SystemExit(f"agents {wrong} were not told how the run ended; they printed why")
    return ControlPlaneTimes(**times, told_s=told, torch_in_agents="torch" in sys.modules)


def _lead(
    agents: int, port: int, secret: Secret, pids: list[int], began_s: float
) -> tuple[dict[str, float], int, float]:
    """Host 0's side: seconds of each phase, which agent was killed, and when."""
    up: set[int] = set()
    joined_s, reached_s, running_s, killed_at_s, victim = 0.0, 0.0, 0.0, 0.0, agents // 2

    def hear(message: Message) -> None:
        nonlocal killed_at_s, running_s
        up.add(message.rank)
        if len(up) == agents + 1 and not killed_at_s:
            running_s = time.monotonic() - began_s
            killed_at_s = time.monotonic()
            os.kill(pids[victim], signal.SIGKILL)

    job = Job(entry="wait", argument="", world_size=agents + 1, threads=1)
    parts = [HostPart(ranks=1, threads=1, argument="")] * (agents + 1)
    try:
        with Hosts(address=_LEADER, port=port, secret=secret, members=agents, entries=ENTRIES) as hosts:
            members = hosts.membership.admit(partial(typed_value, HostInfo), within_s=60)
            joined_s = time.monotonic() - began_s
            check_connectivity(ConnectivityListener("host 0", _LEADER), members)
            reached_s = time.monotonic() - began_s
            hosts.run(job, on_message=hear, parts=parts, start_s=START_AT_LATEST_S)
    except RunFailed as error:
        name = _name(victim)
        if not str(error).startswith(f"{name} ({_address(victim)}) was lost"):
            raise
    ended_s = time.monotonic() - killed_at_s
    phases = {"joined_s": joined_s, "reached_s": reached_s, "running_s": running_s, "ended_s": ended_s}
    return phases, victim, killed_at_s


def _forked_agent(number: int, port: int, secret: Secret, board: Board) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.nice(_NICER)
        _serve(number, port, secret, board)
        code = 0
    except PlaitError as error:
        print(f"{_name(number)}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _serve(number: int, port: int, secret: Secret, board: Board) -> None:
    """One agent's whole life; returns where host 0 told it, with the name, that another host was lost."""
    wire = _connected(number, port, secret)
    connectivity = ConnectivityListener(_name(number), wire.local_address)

    def hear(subject: str, sentence: str) -> None:
        if " was lost: " in sentence:
            board.note(number, time.monotonic())

    try:
        serve(
            wire,
            host_info=replace(own_host_info(), name=_name(number)),
            handlers=connectivity.handlers,
            entries=ENTRIES,
            say=hear,
        )
    except RunFailed as error:
        if " was lost: " not in str(error) or "ended the run" not in str(error):
            raise


def _connected(number: int, port: int, secret: Secret) -> Wire:
    """Agents are there before host 0 listens, as under a scheduler; they try again as `plait node` does."""
    while True:
        try:
            return connect(_LEADER, port, secret, local_address=_address(number))
        except LeaderNotReached:
            time.sleep(0.1)


def _name(number: int) -> str:
    return f"host-{number + 1}"


def _address(number: int) -> str:
    return f"127.1.{number // 250}.{number % 250 + 1}"


def _free_port() -> int:
    with listener_at(_LEADER, 0) as listener:
        return listener.getsockname()[1]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
