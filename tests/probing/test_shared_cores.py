"""Hosts that share a core are seen to, each worker on a core of its own is not, whatever else runs on the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from plait.launch.local.run import ForkServer
from plait.launch.values.job import Job, Message
from plait.machines.measured import WorkTiming
from plait.probing.answer import ProbedHost
from plait.probing.rank import share_beside_other_hosts, with_share
from plait.probing.timing import SingleRank
from tests.entry_tables import entries_of

pinned = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")


@pytest.fixture(scope="module")
def shares() -> Iterator[Callable[[str], dict[int, float]]]:
    """What two ranks on the named cores find, each a host of its own."""
    with ForkServer(entries_of("tests.probing.probe_entries"), threads=1) as server:

        def run(cores: str) -> dict[int, float]:
            found: dict[int, float] = {}

            def hear(message: Message) -> None:
                if message.kind == "share":
                    found[message.rank] = message.values["share"]

            job = Job(entry="share_of_a_core", argument=cores, world_size=2, threads=1)
            server.run(job, on_message=hear).require_finished()
            return found

        yield run


@pinned
@pytest.mark.slow  # by real clocks, so another program on that core can spoil it
def test_two_hosts_on_one_core_have_about_half_of_it_each(shares: Callable[[str], dict[int, float]]) -> None:
    core = min(os.sched_getaffinity(0))
    found = shares(f"{core} {core}")
    assert found.keys() == {0, 1} and all(0.3 < share < 0.85 for share in found.values()), found


class Neighbour:
    """The clock of a worker that another program leaves half of its core; it notes how often it was asked."""

    def __init__(self) -> None:
        self.readings = 0

    def time(self, run: Callable[[], object], times: int) -> tuple[float, float]:
        self.readings += 1
        return 0.02, 0.01


class SharedCore(Neighbour):
    """The clock of a worker that has half of its core while both hosts work, and all of it while only its own does."""

    def time(self, run: Callable[[], object], times: int) -> tuple[float, float]:
        self.readings += 1
        return 0.02, 0.01 if self.readings <= 2 else 0.02


def test_a_worker_beside_another_host_s_has_its_share_of_what_it_has_alone() -> None:
    hosts = (ProbedHost(name="here", ranks=(0,)), ProbedHost(name="there", ranks=(1,)))
    assert share_beside_other_hosts(hosts, 0, SingleRank(), SharedCore(), int) == 0.5


def test_a_single_host_has_all_of_its_cores_and_is_not_timed() -> None:
    clock, hosts = Neighbour(), (ProbedHost(name="here", ranks=(0, 1)),)
    assert share_beside_other_hosts(hosts, 0, SingleRank(), clock, int) == 1.0 and not clock.readings


def test_what_other_programs_take_does_not_count() -> None:
    clock = Neighbour()
    hosts = (ProbedHost(name="here", ranks=(0,)), ProbedHost(name="there", ranks=(1,)))
    assert share_beside_other_hosts(hosts, 0, SingleRank(), clock, int) == 1.0
    assert clock.readings == 4, "together, then alone"


def test_times_are_those_of_a_worker_with_its_share() -> None:
    timing = WorkTiming(work="update", sizes=(1000, 2), seconds=0.5, spread=0.1)
    assert with_share([timing], 0.5) == (replace(timing, seconds=1.0),)
