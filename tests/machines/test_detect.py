"""What a host is found to have."""

from __future__ import annotations

import pytest

from plait.machines.detect import detect_machine
from plait.machines.machine import Machine, detect_cpu_machine
from tests.machines.described_gpus import DescribedHost, described_gpus


@pytest.mark.parametrize(
    ("gpus", "name", "unlike"),
    [
        ((("A", 24), ("A", 24)), "A", ()),
        ((("A", 24), ("B", 10), ("A", 24), ("B", 10)), "B", ("A",)),
        ((("A", 24), ("B", 10), ("C", 16)), "B", ("A", "C")),
    ],
)
def test_a_host_goes_by_its_smallest_gpu_and_names_those_unlike_it(
    gpus: tuple[tuple[str, int], ...], name: str, unlike: tuple[str, ...]
) -> None:
    found = detect_machine(library=described_gpus(*gpus), here=DescribedHost())
    least = min(memory for _, memory in gpus) * 2**30
    assert (found.name, found.devices, found.memory_bytes, found.unlike) == (name, len(gpus), least, unlike)
    assert Machine.from_fingerprint(found.fingerprint()) == found


def test_the_fingerprint_of_like_devices_is_what_it_always_was() -> None:
    here = detect_cpu_machine()
    assert "unlike" not in here.fingerprint()
    assert Machine.from_fingerprint(here.fingerprint()).unlike == ()
