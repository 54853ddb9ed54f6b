"""Becomes a command inside a host: `python -I -S enter.py JSON`. Only the standard library, for it starts each process.

The JSON says: `groups` (control groups to join), `namespace` (a path), `over` and `own` (folders: the second appears in
the place of the first, for this host alone; null: shared), `core` (the one to stay on, null: any), `folder`, `command`,
`parent` (whose death is this process' death).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

# From linux/sched.h, linux/prctl.h and linux/mount.h.
CLONE_NEWNS = 0x00020000
PR_SET_PDEATHSIG = 1
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    order = json.loads(sys.argv[1])
    for group in order["groups"]:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    with Path(order["namespace"]).open() as namespace:
        check(libc.setns(namespace.fileno(), 0), "setns")
    if order["own"]:
        put_own_folder(order["own"], order["over"])
    if order["core"] is not None:
        os.sched_setaffinity(0, {order["core"]})
    os.chdir(order["folder"])
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != order["parent"]:  # it died before the request reached the kernel
        os._exit(1)
    os.execvp(order["command"][0], order["command"])


def put_own_folder(own: str, over: str) -> None:
    """In a mount namespace that nobody else sees."""
    check(libc.unshare(CLONE_NEWNS), "unshare")
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount")
    check(libc.mount(own.encode(), over.encode(), None, MS_BIND, None), "mount")


def check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
