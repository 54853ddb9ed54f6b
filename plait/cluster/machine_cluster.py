"""Clusters of machines that are here: one machine, or several hosts that joined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from plait.cluster.catalog import Device, Link, find_device, find_device_by_driver_name, find_link
from plait.cluster.cluster import Cluster, Island
from plait.cluster.topology import Machine
from plait.errors import PlaitError

PRODUCTS_REACH = 0.9
"""Share of the probed products' rate that other matrix products reach on a processor (readings:
planner/step_time/device_rates.py)."""


def cluster_of_machine(machine: Machine, measured_flops: float | None = None, *, workers: int = 1) -> Cluster:
    """This machine as a cluster of one node; `measured_flops` is the FLOP/s of float32 products measured on its
    processor; None takes a typical one's.

    A processor is one device, or `workers` devices that share its cores, memory and memory bandwidth equally. Raises
    PlaitError for a GPU that the catalogue lacks.
    """
    if machine.device == "cpu":
        whole = _processor(machine, measured_flops)
        known = _part_of(replace(whole, memory_bytes=machine.memory_bytes), workers)
        per_node = workers
    else:
        known, per_node = find_device_by_driver_name(machine.name), machine.devices
    if known is None:
        raise PlaitError(
            f"{machine.name} is not in plait's catalogue; describe it in a cluster.json and pass --cluster"
        )
    memory = machine.memory_bytes if machine.device == "cuda" else known.memory_bytes
    here = replace(known, name=machine.name, memory_bytes=memory)
    island = Island(device=here, per_node=per_node, nodes=1, inside=find_link(known.inside))
    return Cluster(name="this machine", islands=(island,), between=find_link(known.between))


def with_share_of_cores(cluster: Cluster, share: float) -> Cluster:
    """A processor's cluster whose workers together use this share of its cores."""
    if share == 1:
        return cluster
    (island,) = cluster.islands
    rates = {precision: rate * share for precision, rate in island.device.peak_flops.items()}
    return replace(cluster, islands=(replace(island, device=replace(island.device, peak_flops=rates)),))


def cluster_of_hosts(hosts: Sequence[tuple[Machine, float | None, int]], between: Link) -> Cluster:
    """Several hosts as one cluster. `hosts` holds each host's machine, the measured FLOP/s of its processor (or None)
    and its number of workers.

    Equal hosts in a row form one island.
    """
    islands: list[Island] = []
    for machine, flops, workers in hosts:
        [one] = cluster_of_machine(machine, flops, workers=workers).islands
        if islands and replace(islands[-1], nodes=1) == one:
            islands[-1] = replace(islands[-1], nodes=islands[-1].nodes + 1)
        else:
            islands.append(one)
    return Cluster(name=f"{len(hosts)} hosts", islands=tuple(islands), between=between)


def _part_of(processor: Device, workers: int) -> Device:
    return replace(
        processor,
        peak_flops={precision: rate / workers for precision, rate in processor.peak_flops.items()},
        memory_bytes=processor.memory_bytes // workers,
        memory_bytes_per_s=processor.memory_bytes_per_s / workers,
        units=max(1, (processor.units or 1) // workers),
    )


def _processor(machine: Machine, flops: float | None) -> Device:
    """This machine's processor as a device: the typical one nearest in cores, its FLOP/s scaled by cores unless they
    were measured. A measured rate is that of the run's own arithmetic, whichever it is."""
    typical = min(
        (find_device(name) for name in ("laptop", "desktop", "server")),
        key=lambda known: abs(math.log((known.units or 1) / machine.cores)),
    )
    rates = {
        precision: flops or rate * machine.cores / (typical.units or 1)
        for precision, rate in typical.peak_flops.items()
    }
    source = f"{'measured' if flops else 'arithmetic of a typical processor'}; memory speed of a {typical.name}"
    reached = PRODUCTS_REACH if flops else None
    return replace(typical, peak_flops=rates, achievable=reached, units=machine.cores, watts=None, source=source)
