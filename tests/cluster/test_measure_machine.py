"""What a host is found to have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from plait.cluster.measure import detect_machine
from plait.cluster.topology import Machine, detect_cpu_machine


@pytest.mark.parametrize(
    ("gpus", "name", "unlike"),
    [
        ((("A", 24), ("A", 24)), "A", ()),
        ((("A", 24), ("B", 10), ("A", 24), ("B", 10)), "B", ("A",)),
        ((("A", 24), ("B", 10), ("C", 16)), "B", ("A", "C")),
    ],
)
def test_a_host_goes_by_its_smallest_gpu_and_names_those_unlike_it(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[tuple[str, int], ...], name: str, unlike: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    properties = [SimpleNamespace(name=kind, total_memory=memory * 2**30) for kind, memory in gpus]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    found = detect_machine()
    least = min(memory for _, memory in gpus) * 2**30
    assert (found.name, found.devices, found.memory_bytes, found.unlike) == (name, len(gpus), least, unlike)
    assert Machine.from_fingerprint(found.fingerprint()) == found


def test_the_fingerprint_of_like_devices_is_what_it_always_was() -> None:
    here = detect_cpu_machine()
    assert "unlike" not in here.fingerprint()
    assert Machine.from_fingerprint(here.fingerprint()).unlike == ()
