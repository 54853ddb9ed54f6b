"""Takes a lab down, whoever is left to do it: `python -m benchmarks.lab.leftovers LAB` waits for the end of its input.

A lab hands its watcher a pipe and never writes: the pipe ends when the lab closes it or dies, also by kill -9. What a
watcher could not do (the machine's own watchers were killed too) is found by its name at the next start.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.lab.wiring import PREFIX

GROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpuacct"))
"""Control groups of version 1: one for quotas, one that counts processor time."""
NAMESPACES = Path("/run/netns")
SCRATCH = Path(tempfile.gettempdir())
OURS = re.compile(rf"{PREFIX}\d+-\d+(-|$)")
"""What a lab names what it makes; nobody else's folder is taken for one."""
PATIENCE_S = 10.0
LOOK_EVERY_S = 0.01


def name_of_lab(pid: int) -> str:
    """The prefix of all that the lab of this process makes; a later process with the same number has another."""
    return f"{PREFIX}{pid}-{_began(pid)}"


def groups_of(namespace: str) -> list[Path]:
    """The control groups of a host."""
    return [root / namespace for root in GROUPS]


def scratch_of(lab: str) -> Path:
    """Where a lab keeps what need not outlive it."""
    return SCRATCH / lab


def sweep() -> list[str]:
    """Take down all labs whose process is gone; answers their names."""
    found = {_lab_of(path.name) for path in _all_traces()}
    dead = sorted(lab for lab in found if not _lives(lab))
    for lab in dead:
        remove(lab)
    return dead


def remove(lab: str) -> None:
    """End the lab's processes, then its namespaces (cables go with them), control groups and scratch folder."""
    mine = [path for path in _all_traces() if _lab_of(path.name) == lab]
    for path in mine:
        if path.parent == NAMESPACES:
            end_processes(lambda name=path.name: _in_namespace(name))
        elif path.parent in GROUPS:
            end_processes(lambda group=path: in_group(group))
    for path in mine:
        if path.parent == NAMESPACES:
            subprocess.run(["ip", "netns", "delete", path.name], check=False, capture_output=True)
        elif path.parent in GROUPS:
            _until_removed(path)
        else:
            shutil.rmtree(path, ignore_errors=True)


def in_group(group: Path) -> list[int]:
    """The processes of a control group."""
    with contextlib.suppress(OSError):
        return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    return []


def end_processes(living: Callable[[], Iterable[int]]) -> None:
    """Kill until nobody is left; raises TimeoutError when somebody stays."""
    end = time.monotonic() + PATIENCE_S
    while pids := list(living()):
        if time.monotonic() > end:
            raise TimeoutError(f"processes {pids} of a lab do not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)


def _until_removed(group: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while group.exists() and time.monotonic() < end:
        with contextlib.suppress(OSError):  # busy while the last process is still on its way out
            group.rmdir()
            return
        time.sleep(LOOK_EVERY_S)


def _all_traces() -> list[Path]:
    roots = [NAMESPACES, *GROUPS, SCRATCH]
    return [path for root in roots if root.is_dir() for path in root.iterdir() if OURS.match(path.name)]


def _in_namespace(name: str) -> list[int]:
    told = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
    return [int(pid) for pid in told.stdout.split()]


def _lab_of(name: str) -> str:
    """The lab that a trace belongs to: prefix, number of the process, its beginning."""
    return PREFIX + "-".join(name.removeprefix(PREFIX).split("-")[:2])


def _lives(lab: str) -> bool:
    pid, _, began = lab.removeprefix(PREFIX).partition("-")
    return pid.isdecimal() and _began(int(pid)) == began


def _began(pid: int) -> str:
    """When a process began, in ticks since the machine started; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def watch(lab: str) -> None:
    """Wait until whoever holds the other end of our input lets go of it, then take the lab down."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    remove(lab)


if __name__ == "__main__":
    watch(sys.argv[1])
