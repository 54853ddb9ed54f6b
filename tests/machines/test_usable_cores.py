"""How many cores a process may use: the least of what the kernel, its control groups and Slurm grant."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait.machines.machine import usable_cores

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
    ],
)
def test_the_least_counts(tmp_path: Path, quotas: dict[str, str], environment: dict[str, str], least: int) -> None:
    assert cores(tmp_path, quotas, **environment) == least
