"""Starts the processes that pass a run on to tracking tools, and ends them with the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from plait.regular_file import append_to_file
from plait.tracking.follow import arrived_file, read_arrived
from plait.tracking.trackers import TRACKING_TOOLS, tracking_tools_of

WAIT_AT_END_S = 20.0
"""How long a command waits for the last steps to arrive."""


@contextmanager
def tracked(to: Collection[str], folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, pass the run in this folder on to the tracking tools among a recipe's destinations.

    Their messages go to `say`, from threads. Their failures never reach the block."""
    processes: dict[str, subprocess.Popen[str]] = {}
    for name in tracking_tools_of(to):
        try:
            processes[name] = _start(name, folder)
        except OSError as error:
            say(f"warning  the run goes on without {TRACKING_TOOLS[name].title}: {error.strerror}")
    listeners = [threading.Thread(target=_pass_on, args=(one, say), daemon=True) for one in processes.values()]
    for one in listeners:
        one.start()
    try:
        yield
    finally:
        for process in processes.values():
            with suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()
        until_s = time.monotonic() + WAIT_AT_END_S
        for name, process in processes.items():
            try:
                process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                say(f"{name:<8} {TRACKING_TOOLS[name].title} is still receiving steps, for ten more minutes at most")
        for one in listeners:
            one.join(timeout=1.0)


def tools_behind(to: Collection[str], folder: Path, steps: int) -> Sequence[str]:
    """The tracking tools among a recipe's destinations that have not received this many steps of the run yet."""
    return [name for name in tracking_tools_of(to) if read_arrived(arrived_file(folder, name)).step < steps]


def _start(name: str, folder: Path) -> subprocess.Popen[str]:
    # -P with our own sys.path: it finds the modules that we find, and nothing in the current folder.
    command = [sys.executable, "-P", "-m", "plait.tracking.follow", str(folder.resolve()), name]
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    with append_to_file(folder / f"tracker-{name}.log") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the run; this one sends its last steps
        )


def _pass_on(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    assert process.stdout is not None
    with process.stdout as sentences:
        for line in sentences:
            say(line.rstrip("\n"))
