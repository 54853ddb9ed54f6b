"""Kernel settings that keep a process from outliving the one that started it. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

from plait.errors import PlaitError

# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_OWN_FILES = 256
"""Number of other files that a process may open: modules, logs, ranks' wires."""


def require_linux() -> None:
    """Raises PlaitError where the kernel cannot tie a worker's life to its parent's."""
    if sys.platform != "linux":
        raise PlaitError(
            f"plait starts its workers on Linux only, and this is {sys.platform}; "
            "run it in a Linux container or virtual machine (on Windows: WSL)"
        )


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill the calling process at once when its parent dies, also by kill -9.

    The kernel means the parent's *thread* that started this process.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the request reached the kernel: then no signal would ever come.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that `end_children` finds them all."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children() -> None:
    """Kill and reap every child of the calling process, and the children these leave behind."""
    while pids := _children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def allow_open_files(more: int, what: str) -> None:
    """Raise this process's soft limit of open files so that `what` may open `more` of them; raises PlaitError where the
    hard limit is lower."""
    needed = more + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise PlaitError(
                f"{what} needs {needed:,} open files here, and this machine allows {hard:,}; raise the limit (ulimit "
                f"-Hn, LimitNOFILE= of a service, --ulimit nofile= of a container)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def thread_count() -> int:
    """How many threads the calling process has, those of C libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


def _children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except FileNotFoundError:  # a kernel built without CONFIG_PROC_CHILDREN
        return []


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
