"""Times of hosts of one make, made consistent."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from plait.machines.measured import MeasuredDevice
from plait.planner.step_time import measured_compute
from plait.probing.measurements import pool_measurements
from tests.probing.probed import measured, timed

SHAPES = [(rows, inner, 256) for rows in (2048, 3072, 4096) for inner in range(256, 1025, 64)]


def of_speed(host: str, speed: float, *, noise: float = 0.0, seed: int = 0, stream_s: float = 0.5) -> MeasuredDevice:
    """A worker that multiplies 10^9 pairs a second times its speed, and streams in proportion."""
    numbers = random.Random(seed)
    rounds = [1 + numbers.uniform(-noise, noise) for _ in range(len(SHAPES) + 2)]
    products = [
        timed("product", s, s[0] * s[1] * s[2] * 1e-9 / speed * r) for s, r in zip(SHAPES, rounds, strict=False)
    ]
    stream = timed("stream", (4096, 128, 384), stream_s / speed * rounds[-2])
    copy = timed("copy", (2**26,), 0.03 / speed * rounds[-1])
    return MeasuredDevice(
        host=host, name="a processor", workers=1, threads=1, memory_bytes=2**34, timed=(*products, stream, copy),
        beside={}, granted=1.0, rates=(speed,),
    )  # fmt: skip


def product_s(host: MeasuredDevice) -> float:
    return float(
        measured_compute.measured_product_s(
            replace(host, timed=(*host.timed, timed("launch", (), 1e-9))), 4096, 512, 256
        )
    )


def test_noise_of_single_readings_moves_neither_the_ratio_nor_the_times() -> None:
    speeds = (1.0, 1.0, 0.5, 0.25)
    worst: list[tuple[float, float, float]] = []
    for seed in range(20):
        noisy = [of_speed(f"{at}", speed, noise=0.1, seed=10 * seed + at) for at, speed in enumerate(speeds)]
        found = pool_measurements(measured(devices=tuple(noisy))).devices
        told, seen = ([product_s(host) * s for host, s in zip(some, speeds, strict=True)] for some in (found, noisy))
        ideal = 4096 * 512 * 256 * 1e-9
        worst.append((max(told) / min(told) - 1, max(seen) / min(seen) - 1, max(abs(s / ideal - 1) for s in told)))
        for own in found[1:]:  # every piece differs by the same factor
            ratios = [b.seconds / a.seconds for a, b in zip(found[0].timed, own.timed, strict=True)]
            assert max(ratios) == pytest.approx(min(ratios))
    ratio, raw_ratio, off = np.mean(worst, axis=0)
    assert ratio < raw_ratio / 2 and off < 0.06, (ratio, raw_ratio, off)


def test_a_single_unlucky_reading_counts_for_nothing() -> None:
    hosts = [of_speed(name, 1.0) for name in "abc"]
    unlucky = replace(
        hosts[1],
        timed=tuple(replace(one, seconds=one.seconds * (1 + 5 * (one.work == "stream"))) for one in hosts[1].timed),
    )
    found = pool_measurements(measured(devices=(hosts[0], unlucky, hosts[2])))
    assert [one.seconds for one in found.devices[1].timed] == pytest.approx([one.seconds for one in hosts[1].timed])
    assert found.devices[1].host == "b"


@pytest.mark.parametrize(
    "other",
    [
        of_speed("b", 0.5, stream_s=80.0),
        replace(of_speed("b", 0.5, noise=0.3, seed=3), name="another processor"),
        replace(of_speed("b", 0.5, noise=0.3, seed=3), threads=2),
    ],
    ids=["no common factor", "another name", "other threads"],
)
def test_hosts_of_another_make_keep_their_own_times(other: MeasuredDevice) -> None:
    before = measured(devices=(of_speed("a", 1.0, stream_s=20.0), other))
    assert pool_measurements(before) == before


def test_one_host_stays_as_it_was_timed() -> None:
    before = measured(devices=(of_speed("a", 1.0, noise=0.2),))
    assert pool_measurements(before) == before
