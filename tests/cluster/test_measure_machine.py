"""What a host is found to have."""

from __future__ import annotations

import pytest
import torch

from plait.cluster import measure
from plait.cluster.measure import MatmulRate, detect_machine, measure_matmul_flops
from plait.cluster.topology import Machine, detect_cpu_machine
from tests.cluster.described_gpus import DescribedHost, described_gpus


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


def test_a_try_during_which_others_had_the_processor_still_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TRY_S", -1.0)
    monkeypatch.setattr(measure, "DISTURBED_S", 0.0)
    assert measure_matmul_flops(threads=1, size=8).flops > 0


def test_a_peak_that_was_measured_under_load_says_so() -> None:
    quiet, busy = MatmulRate(flops=1e11, granted=0.97), MatmulRate(flops=1e11, granted=0.4)
    assert quiet.doubt == ""
    assert "this process had 40% of its cores' time: it may be higher" in busy.doubt


def test_a_measured_peak_is_the_best_of_several_short_tries() -> None:
    rate = measure_matmul_flops(threads=1, size=256)
    assert rate.flops > 1e8
    assert 0 < rate.granted <= 1
    assert torch.get_num_threads() >= 1
