"""Removes disturbances of single readings from the times of equal hosts: such hosts differ by one factor in all they
do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from plait.cluster.measured import MeasuredDevice, Measurements, WorkKind

EQUAL_HOSTS_TOLERANCE, EQUAL_HOSTS_TIME_SHARE = 0.15, 0.75
"""Hosts are equal if the times of work that makes up this share (second) of all time deviate by at most this tolerance
(first), as a difference of logarithms, from one common factor."""
POOLING_ROUNDS = 8
"""Rounds of fitting factors and common times in turn; it converges in two or three."""

RealArray = NDArray[np.float64]
_Piece = tuple[WorkKind, tuple[int, ...]]


def pool_measurements(measured: Measurements) -> Measurements:
    """The same measurements with consistent times for equal hosts: the common time of each piece of work, times one
    factor per host. A single unlucky reading then slows down neither a host nor the forecast.

    Hosts are equal if their processors or GPUs have the same name, they have as many workers and threads, and their
    times do differ by one factor (more or fewer cores granted, another clock rate); all others keep the times that were
    measured.
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
    if (
        max(_quantile(np.abs(off), weights, EQUAL_HOSTS_TIME_SHARE) for off in log_times - fitted)
        > EQUAL_HOSTS_TOLERANCE
    ):
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
    """The weighted quantile of `values`; a `share` of one half gives the weighted median."""
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, below[-1] * share)])
