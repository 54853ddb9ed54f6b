"""Keeps a virtual machine's processors from falling asleep under the hosts: `python -m benchmarks.lab.awake CORE`.

A host that is held to its share, or waits for a message, leaves its processor with nothing to do. A virtual one is then
given back to the machine below, and is back half a millisecond late, or much later where somebody else has taken it.
Hosts with real processors of their own pay nothing like that, and one that waits for nobody pays less. So somebody is
always ready to run who gives way to everybody else.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab.leftovers import groups_of

ROOT = Path(__file__).parents[2]
PROCESSORS = Path("/proc/cpuinfo")
BETWEEN_LOOKS = 1_000_000
LEAST_WEIGHT = "2"
"""Of 1,024 that others have; for kernels that know no idle groups (Linux before 5.15)."""


class Awake:
    """One process a core until it is ended, in control groups: one behind all others, one that tells what they took.

    Its own policy would not do: in a session of its own a process competes as its session (see sched(7), autogroup).
    """

    def __init__(self, cores: Sequence[int], group: str) -> None:
        """Keeps nobody awake where the machine is no virtual one."""
        self._groups = groups_of(group)
        self._running: list[subprocess.Popen[bytes]] = []
        if not is_virtual(PROCESSORS.read_text()):
            return
        for one in self._groups:
            one.mkdir(exist_ok=True)  # both may be one
        idle, weight = self._groups[0] / "cpu.idle", self._groups[0] / "cpu.shares"
        (idle if idle.exists() else weight).write_text("1" if idle.exists() else LEAST_WEIGHT)
        for core in sorted(set(cores)):
            command = [sys.executable, "-m", "benchmarks.lab.awake", str(core)]
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True)
            self._running.append(process)
            for one in self._groups:
                (one / "cgroup.procs").write_text(str(process.pid))

    def user_s(self) -> float:
        """Processor seconds that they took so far, by the account that Lab.other_programs_s looks at."""
        return int((self._groups[1] / "cpuacct.usage_user").read_text()) / 1e9 if self._running else 0.0

    def end(self) -> None:
        """Let them go."""
        for process in self._running:
            assert process.stdin
            process.stdin.close()
            process.wait()
        self._running.clear()


def is_virtual(processors: str) -> bool:
    """Whether the processors that Linux tells of stand on a hypervisor."""
    flags = (line for line in processors.split("\n") if line.startswith("flags"))
    return "hypervisor" in next(flags, "").split()


def main() -> None:
    os.sched_setaffinity(0, {int(sys.argv[1])})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(BETWEEN_LOOKS):
            pass


if __name__ == "__main__":
    main()
