"""What is measured of hosts that come to a run that has begun: only what is not known of them yet."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import pytest

from plait.launch.values.job import Job, JobResult, Message
from plait.machines.cluster import Cluster
from plait.machines.machine import Machine
from plait.machines.measured import MeasuredDevice, WorkTiming
from plait.machines.requested_workers import PeakNeed
from plait.model.sizes import explicit_shape
from plait.planner.derive.resources import FixedWorkers, ProbeNeed
from plait.probing.answer import PairTiming, ProbedHost, ProbeResult, RankReport
from plait.probing.measurements import RECHECK_AFTER_S
from plait.probing.measuring_time import UNLIMITED
from plait.probing.request import BRIEF_S, ProbeRequest
from plait.probing.survey import PlannedHosts, measure_ahead, survey_machines
from plait.workers import PROBE_ENTRY, OnMessage
from plait.working_folder import WorkingFolder
from tests.planner.hosts import HOST, KINDS
from tests.planner.machines import recipe
from tests.probing.probed import device, link, point, timed

SHAPE = explicit_shape(layers=2, width=64, vocabulary=256, sequence=32)
NEED = ProbeNeed(shape=SHAPE, batch_sequences=8, precision="float32")
POINTS = tuple(point(2**k, 1e-4 + 2**k / 1e9) for k in (10, 20, 22))


class Hosts:
    """Hosts of one worker each, all alike, which answer a probe; keeps which were probed, and how thoroughly."""

    def __init__(self, folder: Path, names: str, speeds: Mapping[str, float] | None = None) -> None:
        self.working_folder, self.names = WorkingFolder(folder), names
        self.speeds = speeds or {}
        self.probes: list[str] = []

    @property
    def fixed_workers(self) -> FixedWorkers:
        return FixedWorkers(workers=len(self.names), threads=1)

    def host_machines(self, peak: PeakNeed = "measured") -> tuple[tuple[Machine, float | None, int], ...]:
        return tuple((HOST, 1e11, 1) for _ in self.names)

    def addresses(self) -> tuple[str, ...]:
        return tuple(f"10.0.0.{ord(name)}" for name in self.names)

    def run(self, job: Job, on_message: OnMessage) -> JobResult:
        assert (job.entry, job.world_size) == (PROBE_ENTRY, len(self.names))
        request = ProbeRequest.from_json(job.argument)
        self.probes.append({0.0: "check", BRIEF_S: "brief"}.get(request.seconds, "whole"))
        values = json.loads(json.dumps(asdict(self._probed(request))))
        on_message(Message(rank=0, kind="probed", values=values))
        return JobResult(stopped_by="finished", wall_s=0.0)

    def _probed(self, request: ProbeRequest) -> ProbeResult:
        count = len(self.names)
        between = [
            replace(link(kind, *POINTS, scope="between", ranks=count), hosts=tuple(self.names[:2])) for kind in KINDS
        ]
        ranks = [
            RankReport(
                name="a processor", memory_bytes=2**34, threads=1, granted=1.0, timed=self._timed(request, name),
                alone=(), links=tuple(between) if count > 1 and not rank else (), overlaps=(),
            )
            for rank, name in enumerate(self.names)
        ]  # fmt: skip
        return ProbeResult(
            hosts=tuple(ProbedHost(name=name, ranks=(rank,)) for rank, name in enumerate(self.names)),
            pairs=tuple(PairTiming(first=a, second=b, points=POINTS) for a, b in combinations(range(count), 2)),
            ranks=tuple(ranks),
        )

    def _timed(self, request: ProbeRequest, name: str) -> tuple[WorkTiming, ...]:
        speed = 1e10 * self.speeds.get(name, 1.0)
        return device(*(timed("product", one, one[0] * one[1] * one[2] / speed) for one in request.products)).timed

    def planned(self, ago_s: float | None = None) -> PlannedHosts:
        """The hosts as those of a plan, until so long ago; None where they are those of the newest one."""
        machines = self.host_machines()
        if ago_s is None:
            return PlannedHosts(hosts=machines, addresses=self.addresses())
        return PlannedHosts(hosts=machines, addresses=self.addresses(), together_until_s=time.monotonic() - ago_s)


def clustered(hosts: Hosts, *before: PlannedHosts) -> Cluster:
    config = recipe(hosts.working_folder.path, "train.budget=2 hours")
    probe = survey_machines(config, hosts, lambda line: None, "kept", before=before).probe  # pyright: ignore[reportArgumentType]
    assert probe is not None
    return probe(NEED)


def devices(cluster: Cluster) -> tuple[MeasuredDevice, ...]:
    assert cluster.measured is not None
    return cluster.measured.devices


def product_s(one: MeasuredDevice) -> float:
    return max(each.seconds for each in one.times_of("product"))


@pytest.fixture
def measured(tmp_path: Path) -> Hosts:
    """Four hosts that were measured together; the last one has half the speed of the others."""
    hosts = Hosts(tmp_path, "abcd", {"d": 0.5})
    clustered(hosts)
    assert hosts.probes == ["whole"]
    return hosts


def test_who_is_left_is_not_measured_again_however_many_go_one_after_another(tmp_path: Path, measured: Hosts) -> None:
    three, two = Hosts(tmp_path, "abd"), Hosts(tmp_path, "ad")
    first = clustered(three, measured.planned())
    long_ago = 2 * RECHECK_AFTER_S
    second = clustered(two, measured.planned(long_ago), three.planned())
    assert not three.probes and not two.probes
    assert [one.host for one in devices(first)] == ["a", "b", "d"]
    assert [one.host for one in devices(second)] == ["a", "d"]


def test_a_host_that_comes_back_soon_is_not_measured_again_in_whatever_order(tmp_path: Path, measured: Hosts) -> None:
    left, again = Hosts(tmp_path, "acd"), Hosts(tmp_path, "acdb")
    found = devices(clustered(again, measured.planned(60.0), left.planned()))
    assert again.probes == [] and [one.host for one in found] == ["a", "c", "d", "b"]
    assert product_s(found[2]) == pytest.approx(2 * product_s(found[3]))


def test_of_a_host_that_comes_back_late_the_links_are_measured(tmp_path: Path, measured: Hosts) -> None:
    left = Hosts(tmp_path, "abc")
    again = Hosts(tmp_path, "abcd", {"d": 0.52})
    found = devices(clustered(again, measured.planned(2 * RECHECK_AFTER_S), left.planned()))
    assert again.probes == ["brief"]
    assert product_s(found[3]) == pytest.approx(2 * product_s(found[0])), "as it was measured at length"
    clustered(Hosts(tmp_path, "abcd"))
    slower = Hosts(tmp_path, "abcd", {"d": 0.25})
    found = devices(clustered(slower, measured.planned(2 * RECHECK_AFTER_S), left.planned()))
    assert slower.probes == ["brief"] and product_s(found[3]) == pytest.approx(4 * product_s(found[0])), "as it is now"


def test_a_newcomer_that_was_measured_while_it_waited_counts_as_measured_then(tmp_path: Path, measured: Hosts) -> None:
    unknown = Hosts(tmp_path, "abce")
    clustered(unknown, measured.planned())
    assert unknown.probes == ["brief"], "a host like b at another address"
    waiting = Hosts(tmp_path, "f", {"f": 2.0})
    config = recipe(tmp_path, "train.budget=2 hours")
    for _ in range(2):
        measure_ahead(config, waiting, HOST, HOST, 1, NEED, UNLIMITED)  # pyright: ignore[reportArgumentType]
    assert waiting.probes == ["whole"], "once for such a machine"
    joined = Hosts(tmp_path, "abcf", {"f": 2.0})
    found = devices(clustered(joined, measured.planned()))
    assert joined.probes == ["brief"] and [one.host for one in found] == list("abcf")
    assert len(found[3].timed) == len(found[0].timed) == len(devices(clustered(Hosts(tmp_path, "abcd")))[0].timed)
    assert product_s(found[3]) == pytest.approx(product_s(found[0]) / 2) and found[0].rates < found[3].rates
    later = Hosts(tmp_path, "abf")
    clustered(later, measured.planned(60.0), joined.planned())
    assert later.probes == [], "by the links that were measured when it came"
