"""Several hosts as a probe of all of them would have them, with speeds and rates that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.machines.cluster import Cluster, cluster_of_hosts
from plait.machines.machine import Machine
from plait.machines.measured import CommOperation, MeasuredDevice, Measurements
from plait.planner.step_time.measured_network import slowest_measured_link
from tests.probing.probed import device, link, measured, point, timed

KINDS: tuple[CommOperation, ...] = (
    "send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "swap_parts", "spread_own",
)  # fmt: skip
HOST = Machine(device="cpu", name="a processor", devices=1, cores=1, memory_bytes=2**34, versions=())


def host(name: str, speed: float) -> MeasuredDevice:
    """A host on which all work takes 1 / speed times as long as on the first one."""
    works = [timed(work, (1024, 256, 256), 0.002) for work in ("product", "product_input", "product_weight")]
    works += [timed(work, (1024, 256, 1024), 0.001) for work in ("stream", "stream_backward")]
    works += [timed("head", (1024, 256, 2048), 0.02), timed("update", (10**6, 10), 0.001)]
    works += [timed(work, (4, 256, 4, 4, 64), 0.001) for work in ("attention", "attention_backward")]
    works += [timed("accumulate", (10**6,), 0.0005), timed("embedding", (1024, 256, 2048), 0.001)]
    one = device(*works, host=name, rates=(speed,))
    slowed = tuple(replace(each, seconds=each.seconds / speed) for each in one.timed)
    return replace(one, workers=1, timed=slowed)


def told(speeds: Sequence[float], rate: float = 1e9) -> Measurements:
    links = [link(kind, *(point(2**k, 1e-4 + 2**k / rate) for k in (10, 20, 26)), scope="between") for kind in KINDS]
    hosts = tuple(host(name, speed) for name, speed in zip("abcdefgh", speeds, strict=False))
    return replace(measured(*links, devices=hosts), workers=len(speeds), overlaps=())


def probed(*speeds: float, rate: float = 1e9) -> Cluster:
    """Hosts of one worker each, as a probe of all of them would have it."""
    found = told(speeds, rate)
    hosts = [(HOST, 1e11 * speed, 1) for speed in speeds]
    return replace(cluster_of_hosts(hosts, slowest_measured_link(found, "between")), measured=found)
