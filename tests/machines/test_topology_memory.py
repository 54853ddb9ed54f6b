"""How much memory is free: the machine's, or what a container's limit leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.machines.machine import free_memory_bytes, usable_memory_bytes

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
