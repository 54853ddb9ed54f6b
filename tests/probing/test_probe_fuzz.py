"""What ranks of another host report of a probe, damaged in hundreds of ways: a sentence, or usable measurements."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from plait.errors import PlaitError, RunFailed
from plait.machines.measured import measurements_from_json, measurements_json, measurements_table
from plait.probing.answer import (
    FailureReport,
    PairReport,
    PairTiming,
    ProbedHost,
    ProbeResult,
    RankReport,
    parse_report,
    parse_result,
    read_report,
)
from plait.probing.measurements import measurements_from, pool_measurements
from plait.probing.request import typical_probe_request
from tests.launch.mutants import mutants
from tests.probing.probed import device, link, measured, point, timed

SEED = 27
PIECES = device(timed("product", (64, 64, 64), 1e-3)).timed
RANK = RankReport(
    name="a processor",
    memory_bytes=2**34,
    threads=1,
    granted=0.9,
    timed=PIECES,
    alone=PIECES[:1],
    links=(),
    overlaps=(),
)
POINTS = (point(1024, 1e-4), point(2**20, 1e-3))
LINKS = (link("all_reduce", *POINTS), link("all_reduce", *POINTS, scope="between", ranks=3))
FIRST = replace(RANK, links=LINKS, overlaps=measured().overlaps)
RESULT = ProbeResult(
    hosts=(ProbedHost(name="a", ranks=(0, 1)), ProbedHost(name="b", ranks=(2,))),
    pairs=tuple(PairTiming(first=first, second=second, points=POINTS) for first, second in ((0, 1), (0, 2))),
    ranks=(FIRST, replace(RANK, alone=()), replace(RANK, alone=())),
)
REPORTS = (
    FailureReport(failure="it adds up to 5"), FailureReport(failure=None),
    PairReport(points=POINTS), PairReport(points=None), RANK, FIRST,
)  # fmt: skip


def plain(value: Any) -> Any:
    return json.loads(json.dumps(asdict(value)))


def test_an_honest_result_is_taken() -> None:
    assert parse_result(plain(RESULT)) == RESULT
    for report in REPORTS:
        assert read_report(type(report), json.dumps(plain(report)).encode(), "worker 1 on b") == report


def test_a_damaged_result_is_refused_with_a_sentence_or_can_be_used() -> None:
    refused = 0
    for damaged in mutants(plain(RESULT), 1_500, SEED):
        try:
            found = measurements_from(parse_result(damaged), typical_probe_request("cpu", 1), "key")
        except RunFailed as error:
            refused += 1
            assert "reported what no probe measures (" in str(error) and "\n" not in str(error)
            continue
        assert all(math.isfinite(rate) for device in found.devices for rate in device.rates)
        assert measurements_from_json(measurements_json(found), "here") == found
        pool_measurements(found)
        assert measurements_table(found).replace("\n", "").isprintable()
    assert refused > 750


@pytest.mark.parametrize("honest", REPORTS, ids=lambda report: type(report).__name__)
def test_a_damaged_report_between_ranks_is_refused_with_a_sentence(honest: Any) -> None:
    for damaged in mutants(plain(honest), 150, SEED):
        try:
            parse_report(type(honest), damaged, "worker 2 on b")
        except PlaitError as error:
            assert str(error).startswith("worker 2 on b reported what no probe measures (") and "\n" not in str(error)


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"{", b"[" * 10**5, b"NaN", b"null", b'{"failure": 5}', b'{"failure": "\\u001b[2J"}']
)
def test_bytes_that_are_no_report_are_refused_with_a_sentence(data: bytes) -> None:
    with pytest.raises(RunFailed, match=r"^worker 2 on b reported what no probe measures \(") as caught:
        read_report(FailureReport, data, "worker 2 on b")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seconds", math.nan), ("seconds", math.inf), ("seconds", -1.0), ("seconds", 0), ("seconds", "1"),
        ("seconds", 1e300), ("spread", -0.1), ("spread", None), ("sizes", [64]), ("sizes", "64"), ("work", "magic"),
        ("work", []),
    ],
)  # fmt: skip
def test_a_figure_that_cannot_be_is_refused(key: str, value: object) -> None:
    damaged = plain(RESULT)
    damaged["ranks"][2]["timed"][0][key] = value
    with pytest.raises(RunFailed, match="reported what no probe measures"):
        parse_result(damaged)
