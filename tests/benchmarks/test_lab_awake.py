"""Do those who keep a virtual machine's processors awake give way to everybody, and end with their lab?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest

from benchmarks.lab.awake import is_virtual

ROOT = Path(__file__).parents[2]


def test_a_machine_is_virtual_where_its_processors_say_so():
    assert is_virtual("processor\t: 0\nflags\t\t: fpu vme hypervisor lahf_lm\n")
    assert not is_virtual("processor\t: 0\nflags\t\t: fpu vme lahf_lm\nbugs\t\t: hypervisor\n")
    assert not is_virtual("processor\t: 0\nBogoMIPS\t: 50.00\n"), "another make of processor tells nothing"


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has such processes")
def test_a_keeper_runs_on_its_core_when_nobody_else_wants_to_and_ends_with_its_input():
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "benchmarks.lab.awake", str(core)]
    keeper = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
    assert keeper.stdin
    try:
        begun = monotonic()
        while os.sched_getscheduler(keeper.pid) != os.SCHED_IDLE:
            assert keeper.poll() is None and monotonic() - begun < 30
            sleep(0.01)
        assert os.sched_getaffinity(keeper.pid) == {core}
    finally:
        keeper.stdin.close()
    assert keeper.wait(timeout=60) == 0
