"""Times of hosts of one make, freed of what befell single readings: such hosts differ by one factor in all they do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from plait.cluster.measured import MeasuredDevice, MeasuredWork, Measurements

ALIKE, MOSTLY = 0.15, 0.75
"""What times of like hosts may stray from a common factor, in so much of all time; more is another make after all."""
POOLING_ROUNDS = 8
"""Rounds of fitting factors and common times in turn; it converges in two or three."""

RealArray = NDArray[np.float64]
_Piece = tuple[MeasuredWork, tuple[int, ...]]


def pool_measurements(measured: Measurements) -> Measurements:
    """The same with the times of hosts of one make made consistent: what each piece of work takes on them all, times a
    factor of each host. A single unlucky reading then neither slows a host down nor the forecast.

    Of one make are hosts whose processors, or GPUs, have one name and as many workers and threads, and whose times do
    differ by a factor (more or fewer cores granted, another clock); all others stay as they were timed.
    """
    makes: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
    for place, host in enumerate(measured.devices):
        makes[host.name, host.workers, host.threads].append(place)
    devices = list(measured.devices)
    for places in makes.values():
        if len(places) > 1:
            for place, host in zip(places, _pool_equal_hosts([devices[place] for place in places]), strict=True):
                devices[place] = host
    return replace(measured, devices=tuple(devices))


def _pool_equal_hosts(hosts: Sequence[MeasuredDevice]) -> Sequence[MeasuredDevice]:
    times = [_times(host) for host in hosts]
    pieces = [piece for piece in times[0] if all(piece in other for other in times)]
    log_times = np.log([[own[piece] for piece in pieces] for own in times])
    weights = np.exp(log_times.mean(axis=0))  # long work counts: short readings catch a pause or miss it
    factors = np.zeros(len(hosts))
    for _ in range(POOLING_ROUNDS):
        common = np.median(log_times - factors[:, None], axis=0)
        factors = np.array([_quantile(own - common, weights, 0.5) for own in log_times])
    fitted = factors[:, None] + np.median(log_times - factors[:, None], axis=0)
    if max(_quantile(np.abs(off), weights, MOSTLY) for off in log_times - fitted) > ALIKE:
        return hosts
    return [
        _with_seconds(host, dict(zip(pieces, np.exp(own).tolist(), strict=True)))
        for host, own in zip(hosts, fitted, strict=True)
    ]


def _times(host: MeasuredDevice) -> dict[_Piece, float]:
    return {(one.work, one.sizes): one.seconds for one in host.timed}


def _with_seconds(host: MeasuredDevice, seconds: dict[_Piece, float]) -> MeasuredDevice:
    kept = {**_times(host), **seconds}
    return replace(host, timed=tuple(replace(one, seconds=kept[one.work, one.sizes]) for one in host.timed))


def _quantile(values: RealArray, weights: RealArray, share: float) -> float:
    """Of values with weights: the median for a share of a half."""
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, below[-1] * share)])
