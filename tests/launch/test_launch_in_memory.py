"""Copies of ranks' state in their supervisor's memory: whole or not there, and gone with the last process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from plait.launch.in_memory.memory import AgentMemory, RankMemory
from tests.launch.processes import wait_until

DATA = bytes(range(256)) * 1000


@pytest.fixture
def agent() -> Iterator[AgentMemory]:
    with closing(AgentMemory()) as agent:
        yield agent


def put(agent: AgentMemory, rank: int, slot: int, step: int, *, lineage: int = 1, data: bytes = DATA) -> None:
    memory = RankMemory(agent.descriptor, rank)
    memory.begin(slot)
    memory.write(slot, 0, memoryview(data))
    memory.finish(slot, step=step, lineage=lineage, text=f"step {step}".encode(), data_bytes=len(data))


def test_a_copy_comes_back_as_it_was(agent: AgentMemory) -> None:
    put(agent, 249, 2, 7)
    memory = RankMemory(agent.descriptor, 0)
    (copy,) = memory.copies(249)
    assert (copy.step, copy.lineage, copy.slot) == (7, 1, 2)
    assert memory.text(249, copy) == b"step 7" and bytes(memory.data(249, copy)) == DATA
    assert memory.copies(0) == []


def test_a_step_counts_where_every_rank_has_it_of_one_lineage(agent: AgentMemory) -> None:
    for rank, steps in enumerate(((4, 6), (6, 8), (6, 4))):
        for slot, step in enumerate(steps):
            put(agent, rank, slot, step)
    assert agent.whole_steps(3, 1) == [6] and agent.whole_steps(2, 1) == [6]
    assert agent.whole_steps(1, 1) == [6, 4]
    assert agent.whole_steps(4, 1) == [], "a rank without any"
    assert agent.whole_steps(3, 2) == [], "of an earlier line"


def test_a_rank_killed_in_the_middle_of_a_copy_leaves_the_older_one(agent: AgentMemory) -> None:
    put(agent, 0, 0, 5)
    put(agent, 0, 1, 4)
    child = os.fork()
    if child == 0:
        memory = RankMemory(agent.descriptor, 0)
        memory.begin(1)
        memory.write(1, 0, memoryview(b"x" * 10))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert agent.whole_steps(1, 1) == [5]


@pytest.mark.parametrize("place", [0, 8, 16, 24, 39])
def test_a_record_with_another_bit_is_no_copy(agent: AgentMemory, place: int) -> None:
    put(agent, 0, 1, 5)
    at = 64 + place
    (byte,) = os.pread(agent.descriptor, 1, at)
    os.pwrite(agent.descriptor, bytes([byte ^ 1]), at)
    assert agent.whole_steps(1, 1) == []


def test_what_has_no_room_is_an_error_and_no_signal(agent: AgentMemory) -> None:
    memory = RankMemory(agent.descriptor, 0)
    with pytest.raises(OSError, match="larger than"):
        memory.reserve(0, 1 << 39)
    memory.reserve(0, 1 << 20)
    assert os.fstat(agent.descriptor).st_blocks * 512 >= 1 << 20


_HOLDER = """
import os, time
from plait.launch.in_memory.memory import AgentMemory, RankMemory
memory = AgentMemory()
if os.fork() == 0:
    RankMemory(memory.descriptor, 0).write(0, 0, memoryview(b"x" * 1000))
os.write(1, f"{os.fstat(memory.descriptor).st_ino}\\n".encode())  # both at once: each line whole
time.sleep(60)
"""


def test_nothing_is_left_after_kill_9_of_everybody() -> None:
    before = sorted(Path("/dev/shm").iterdir())
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    inodes = {process.stdout.readline().strip() for _ in range(2)}
    assert len(inodes) == 1 and len(holders(*inodes)) == 2
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: holders(*inodes) == [], within_s=5)
    assert sorted(Path("/dev/shm").iterdir()) == before


def holders(inode: str) -> list[str]:
    """The processes that have the file in memory of that number open."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "memfd:plait-state" in str(link.readlink()) and str(link.stat().st_ino) == inode:
                found.append(link.parts[2])
        except OSError:
            continue
    return found
