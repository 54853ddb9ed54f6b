"""The end of a process whose messages gloo's threads have carried: it waits until these have nothing in hand."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

# Note [who wants the lock]: after a message is complete, the thread that carried it frees its tensors, for which it
# takes the interpreter's lock; once the interpreter is ending, asking for it aborts the process. A thread
# that waits for that lock wakes up once in each of Python's switch intervals. So one that has slept through several of
# them without waking waits for no lock, but for work. torch offers no better way: a gloo group's `shutdown` does
# nothing, and its destructor joins these threads while it holds the lock for which they may be waiting.

TASKS = Path("/proc/self/task")
GLOO_THREAD = "pt_gloo_runloop"
INTERVALS = 4
PAUSE_S = 0.1
"""For threads that cannot be watched: about a thousand times the time that freeing a message takes."""
LONGEST_S = 5.0
"""After that a thread is in a message that is never answered, which frees nothing."""


def wait_for_gloo_threads(tasks: Path = TASKS, pause: Callable[[float], None] = time.sleep) -> None:
    """Block until none of gloo's threads in this process has anything in hand."""
    if not tasks.is_dir():
        pause(PAUSE_S)
        return
    deadline, before = time.monotonic() + LONGEST_S, _asleep(tasks)
    while before != [] and time.monotonic() < deadline:
        pause(INTERVALS * sys.getswitchinterval())
        now = _asleep(tasks)
        if now is not None and now == before:
            return
        before = now


def _asleep(tasks: Path) -> list[tuple[str, str]] | None:
    """For each of gloo's threads its number, and how often it has gone to sleep; None if one is awake."""
    found = []
    for task in sorted(tasks.iterdir()):
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        if fields.get("Name", "").strip() != GLOO_THREAD:
            continue
        if not fields.get("State", "").strip().startswith("S"):
            return None
        found.append((task.name, fields.get("voluntary_ctxt_switches", "").strip()))
    return found
