"""Whether what a probe found on several hosts still holds: a short look, before its figures are used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plait.cluster.measured import MeasuredLink, Measurements, Timed
from plait.cluster.probe.request import ProbeRequest, layer_products
from plait.commands.planning.make_plan import ask_rank_0
from plait.commands.planning.workers import WorkerPool
from plait.commands.probing.measurements import PROBE_ENTRY, WorkerExtent, sends_of, timed_on_hosts
from plait.launch.values.job import Job

LOOK_BYTES = 2**20
LARGEST_DRIFT = 1.3
"""So many times the old figure, or less than one of so many parts of it: another cable, another load."""

LinkReadings = Mapping[object, float]


def still_holds(hands: WorkerPool, known: Measurements, asked: ProbeRequest, extent: WorkerExtent) -> bool:
    """Time one message over each road and one layer on each host, and compare; takes some seconds on all hosts.

    Raises RunFailed with the name of a dead device or link, Interrupted where a signal came.
    """
    scene = asked.scenes[0]
    short = replace(
        asked, scenes=(scene,), products=layer_products(scene), attentions=(), messages=(LOOK_BYTES,), seconds=0.0
    )
    job = Job(entry=PROBE_ENTRY, argument=short.to_json(), world_size=extent.workers, threads=extent.threads)
    told = ask_rank_0(hands, job, "probed")
    if [host["name"] for host in told["hosts"]] != [device.host for device in known.devices]:
        return False  # they came in another order, or others came
    layers = zip([device.timed for device in known.devices], timed_on_hosts(told), strict=False)
    return are_alike(_rates(known.links), _rates(sends_of(told))) and all(are_alike(*_common(*pair)) for pair in layers)


def are_alike(before: LinkReadings, now: LinkReadings) -> bool:
    """Whether the same things have about the same figures."""
    return before.keys() == now.keys() and all(
        1 / LARGEST_DRIFT <= now[key] / before[key] <= LARGEST_DRIFT for key in before
    )


def _rates(links: Sequence[MeasuredLink]) -> LinkReadings:
    """Bytes a second of a message of LOOK_BYTES, or of the longest that was timed, over each road."""
    found: dict[object, float] = {}
    for link in links:
        if link.kind == "send":
            point = max((one for one in link.points if one.bytes <= LOOK_BYTES), key=lambda one: one.bytes)
            found[link.scope, link.hosts] = point.bytes / point.seconds
    return found


def _common(before: Sequence[Timed], now: Sequence[Timed]) -> tuple[LinkReadings, LinkReadings]:
    """The seconds of all products that were timed both times, together: single ones are too short to be steady."""
    old, new = ({(one.work, one.sizes): one.seconds for one in some} for some in (before, now))
    both = [key for key in new if key in old and key[0].startswith("product")]
    return {"products": sum(old[key] for key in both)}, {"products": sum(new[key] for key in both)}
