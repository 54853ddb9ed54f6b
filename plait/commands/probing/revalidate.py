"""Whether an earlier probe of several hosts still holds: a short measurement before its figures are used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plait.cluster.measured import MeasuredLink, Measurements, WorkTiming
from plait.cluster.probe.request import ProbeRequest, layer_products
from plait.commands.planning.measuring import ask_rank_0
from plait.commands.planning.workers import PROBE_ENTRY, SYMBOLIC_SHAPES, WorkerPool
from plait.commands.probing.measurements import ProbeWorkers, send_links_of, timed_work_by_host
from plait.commands.probing.result import parse_result
from plait.launch.values.job import Job

RECHECK_MESSAGE_BYTES = 2**20
LARGEST_DRIFT = 1.3
"""A figure that is larger or smaller than before by more than this factor has changed: another cable, another load."""

ReadingByName = Mapping[object, float]


def measurements_still_hold(
    pool: WorkerPool, known: Measurements, request: ProbeRequest, probe_workers: ProbeWorkers
) -> bool:
    """Time one message over each link and one layer on each host, and compare them with the known measurements; takes
    some seconds on all hosts.

    Raises RunFailed with the name of a dead device or link, Interrupted where a signal came.
    """
    model = request.models[0]
    short = replace(
        request,
        models=(model,),
        products=layer_products(model),
        attentions=(),
        messages=(RECHECK_MESSAGE_BYTES,),
        seconds=0.0,
    )
    job = Job(
        entry=PROBE_ENTRY,
        argument=short.to_json(),
        world_size=probe_workers.workers,
        threads=probe_workers.threads,
        needs=(SYMBOLIC_SHAPES,),
        at_stop="abandon",
    )
    result = parse_result(ask_rank_0(pool, job, "probed"))
    if [host.name for host in result.hosts] != [device.host for device in known.devices]:
        return False  # the hosts have another order, or are others
    layers = zip([device.timed for device in known.devices], timed_work_by_host(result), strict=False)
    return are_close(_send_rates(known.links), _send_rates(send_links_of(result))) and all(
        are_close(*_common_product_seconds(*pair)) for pair in layers
    )


def are_close(before: ReadingByName, now: ReadingByName) -> bool:
    """Whether the same things have about the same figures."""
    return before.keys() == now.keys() and all(
        1 / LARGEST_DRIFT <= now[key] / before[key] <= LARGEST_DRIFT for key in before
    )


def _send_rates(links: Sequence[MeasuredLink]) -> ReadingByName:
    """Bytes per second over each link, of a message of LOOK_BYTES or of the longest below it."""
    found: dict[object, float] = {}
    for link in links:
        if link.kind == "send":
            point = max((one for one in link.points if one.bytes <= RECHECK_MESSAGE_BYTES), key=lambda one: one.bytes)
            found[link.scope, link.hosts] = point.bytes / point.seconds
    return found


def _common_product_seconds(
    before: Sequence[WorkTiming], now: Sequence[WorkTiming]
) -> tuple[ReadingByName, ReadingByName]:
    """The seconds of all products that were timed both times, together: single ones are too short to be steady."""
    old, new = ({(one.work, one.sizes): one.seconds for one in some} for some in (before, now))
    both = [key for key in new if key in old and key[0].startswith("product")]
    return {"products": sum(old[key] for key in both)}, {"products": sum(new[key] for key in both)}
