"""What a process may use of this host: cores and memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait.machines.machine import free_memory_bytes, usable_cores, usable_memory_bytes

HERE = len(os.sched_getaffinity(0))


def cores(folder: Path, quotas: dict[str, str], **environment: str) -> int:
    for name, text in quotas.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    (folder / "own").write_text("0::/system.slice/slurm/job_17\n")
    return usable_cores(environment, folder / "own", folder)


@pytest.mark.parametrize(
    ("quotas", "environment", "least"),
    [
        ({}, {}, HERE),
        ({"cpu.max": "150000 100000"}, {}, 1),
        ({"system.slice/slurm/job_17/cpu.max": "100000 100000"}, {}, 1),  # the root of a host has no cpu.max
        ({"system.slice/cpu.max": "50000 100000"}, {}, 1),
        ({}, {"SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "1"}, 1),
        ({"cpu.max": "max 100000"}, {"SLURM_JOB_ID": "17", "SLURM_CPUS_PER_TASK": "512"}, HERE),
        ({}, {"SLURM_CPUS_PER_TASK": "1"}, HERE),  # left behind by somebody's shell: no job of Slurm
        ({}, {"SLURM_JOB_ID": "17"}, HERE),
        ({}, {"PLAIT_CORES": "1"}, 1),
        ({}, {"PLAIT_CORES": "all"}, HERE),
    ],
)
def test_the_least_counts(tmp_path: Path, quotas: dict[str, str], environment: dict[str, str], least: int) -> None:
    assert cores(tmp_path, quotas, **environment) == least


GIB = 2**30


@pytest.mark.parametrize(
    ("groups", "free"),
    [
        ({}, 6 * GIB),
        ({"memory.max": "max", "memory.current": str(GIB)}, 6 * GIB),
        ({"memory.max": str(4 * GIB), "memory.current": str(GIB)}, 3 * GIB),
        ({"memory.max": str(4 * GIB), "memory.current": str(5 * GIB)}, 0),
        ({"memory/memory.limit_in_bytes": str(4 * GIB), "memory/memory.usage_in_bytes": str(GIB)}, 3 * GIB),
        ({"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": str(GIB)}, 6 * GIB),
    ],
)
def test_free_memory_is_the_machines_or_what_a_limit_leaves(tmp_path: Path, groups: dict[str, str], free: int) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {8 * 2**20} kB\nMemAvailable:   {6 * 2**20} kB\nBuffers: 1 kB\n")
    for name, text in groups.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert free_memory_bytes(tmp_path) == free


def test_a_machine_that_does_not_tell_counts_as_half_free(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path) == usable_memory_bytes() // 2
