"""At its end a process waits until gloo's threads have nothing in hand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from plait.custom.process.leaving import GLOO_THREAD, INTERVALS, PAUSE_S, wait_for_gloo_threads

Status = tuple[str, int]
"""A thread's state, and how often it has gone to sleep."""


def write_task(tasks: Path, number: int, status: Status, name: str = GLOO_THREAD) -> None:
    """What the kernel tells of a thread."""
    (tasks / f"{number}").mkdir(parents=True, exist_ok=True)
    text = f"Name:\t{name}\nState:\t{status[0]} (as told)\nvoluntary_ctxt_switches:\t{status[1]}\n"
    (tasks / f"{number}" / "status").write_text(text)


def pauses(tasks: Path, later: Sequence[Status] = ()) -> list[float]:
    """The pauses of a wait, while thread 2 comes to one state after another."""
    taken: list[float] = []

    def pause(seconds: float) -> None:
        if len(taken) < len(later):
            write_task(tasks, 2, later[len(taken)])
        taken.append(seconds)

    wait_for_gloo_threads(tasks, pause)
    return taken


def test_a_process_without_such_threads_waits_for_nothing(tmp_path: Path) -> None:
    write_task(tmp_path, 1, ("R", 5), name="python")
    assert pauses(tmp_path) == []
    assert pauses(tmp_path / "none") == [PAUSE_S]  # where the kernel tells nothing


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        (("S", 7), [], 1),  # it sleeps through
        (("R", 7), [("R", 7), ("S", 8), ("S", 8)], 3),  # it works, and then sleeps
        (("S", 7), [("S", 11), ("S", 15), ("S", 16), ("S", 16)], 4),  # it wakes for the interpreter's lock
    ],
)
def test_a_thread_that_wakes_is_waited_for(tmp_path: Path, first: Status, later: list[Status], expected: int) -> None:
    write_task(tmp_path, 1, ("S", 3))
    write_task(tmp_path, 2, first)
    assert pauses(tmp_path, later) == [INTERVALS * sys.getswitchinterval()] * expected
