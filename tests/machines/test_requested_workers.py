"""What a recipe asks of one machine: devices that are there, and no more workers and threads than it has cores."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from plait.checked_json import parse_object, typed_value
from plait.errors import PlaitError
from plait.machines.detect import detect_machine
from plait.machines.machine import Machine, detect_cpu_machine
from plait.machines.requested_workers import RequestedWorkers, SurveyRequest, check_requested_workers, chosen_gpus
from tests.machines.described_gpus import DescribedHost, described_gpus

EIGHT_CORES = replace(detect_cpu_machine(), cores=8)


@pytest.mark.parametrize(
    ("asked", "present", "gpus"),
    [
        ({}, 0, ()),
        ({}, 4, (0, 1, 2, 3)),
        ({"devices": "cpu"}, 4, ()),
        ({"devices": (2, 0)}, 4, (2, 0)),
        ({"workers": 2}, 4, (0, 1)),
        ({"workers": 1, "devices": (3, 1)}, 4, (3,)),
        ({"workers": 3}, 0, ()),
        ({"workers": 3, "devices": "cpu"}, 1, ()),
    ],
)
def test_the_gpus_that_are_used(asked: dict[str, Any], present: int, gpus: tuple[int, ...]) -> None:
    requested = RequestedWorkers(**asked)
    assert chosen_gpus(requested, present) == gpus
    asks = SurveyRequest(requested=requested, peak="as known")
    assert typed_value(SurveyRequest, parse_object(asks.to_json())) == asks


@pytest.mark.parametrize(
    ("asked", "present", "told"),
    [
        (
            {"devices": (0, 2)},
            2,
            "run.devices names GPU 2, and torch sees GPUs 0 to 1",
        ),
        ({"devices": (1,)}, 1, "run.devices names GPU 1, and torch sees only GPU 0"),
        ({"devices": (0,)}, 0, 'torch sees none on this machine; write run.devices = "cpu" or "auto"'),
        (
            {"workers": 3},
            2,
            "run.workers = 3 are more than the 2 GPUs to use, and each GPU has one worker",
        ),
    ],
)
def test_gpus_that_are_not_there_are_refused(asked: dict[str, Any], present: int, told: str) -> None:
    with pytest.raises(PlaitError, match=told):
        chosen_gpus(RequestedWorkers(**asked), present)


@pytest.mark.parametrize(
    ("asked", "counts", "threads"),
    [
        ({}, [1, 2, 4, 8], [8, 4, 2, 1]),
        ({"workers": 3}, [3], [2]),
        ({"threads": 2}, [1, 2, 4], [2, 2, 2]),
        ({"threads": 3}, [1, 2], [3, 3]),
        ({"workers": 2, "threads": 4}, [2], [4]),
    ],
)
def test_fixed_workers_and_threads_restrict_the_search(
    asked: dict[str, Any], counts: list[int], threads: list[int]
) -> None:
    requested = RequestedWorkers(**asked)
    check_requested_workers(requested, EIGHT_CORES)
    assert requested.worker_counts(EIGHT_CORES) == counts
    assert [requested.threads_of_each(EIGHT_CORES, count) for count in counts] == threads


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"threads": 9}, "run.threads = 9 are more than this machine has, 8 cores; choose at most 8"),
        ({"workers": 9}, "run.workers = 9 are more than this machine has, 8 cores; choose at most 8"),
        ({"workers": 3, "threads": 3}, "want 9 cores, and this machine has 8; lower one of them"),
    ],
)
def test_more_than_the_cores_is_refused(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(PlaitError, match=told):
        check_requested_workers(RequestedWorkers(**asked), EIGHT_CORES)


def test_a_processors_arithmetic_is_that_of_the_cores_in_use() -> None:
    assert RequestedWorkers(workers=3).share_of(EIGHT_CORES, 3) == 6 / 8
    assert RequestedWorkers(threads=1).share_of(EIGHT_CORES, 2) == 2 / 8
    assert RequestedWorkers().share_of(EIGHT_CORES, 3) == 1


MIXED = (("A", 24), ("B", 10), ("A", 24))


def test_a_machine_is_known_by_the_gpus_that_are_used() -> None:
    detect = partial(detect_machine, library=described_gpus(*MIXED), here=DescribedHost())
    some = detect(RequestedWorkers(devices=(2, 0)))
    assert (some.name, some.devices, some.unlike, some.gpus) == ("A", 2, (), (2, 0))
    assert Machine.from_fingerprint(some.fingerprint()) == some
    assert some.fingerprint() != detect(RequestedWorkers(devices=(0, 2))).fingerprint()
    assert detect(RequestedWorkers(devices=(0, 1, 2))) == detect()
    assert detect(RequestedWorkers(devices="cpu")) == detect_cpu_machine()
