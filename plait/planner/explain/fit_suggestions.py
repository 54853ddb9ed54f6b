"""What would make a model fit that fits nowhere, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plait.errors import PlaitError
from plait.machines.cluster import Cluster
from plait.model.sizes import MODEL_SIZES, named_shape
from plait.planner.explain.tipping_points import with_memory
from plait.planner.problem.software_profile import PLAIT_PROFILE, SoftwareProfile
from plait.planner.problem.workload import Workload, workload_of
from plait.planner.search.constraints import Constraints
from plait.planner.search.feasibility import DoesNotFit
from plait.planner.search.search import search
from plait.units import format_bytes, format_count

SHORTEST_SEQUENCE = 512
MOST_DEVICES = 4096
"""How many times more devices are tried."""


def fit_suggestions(found: DoesNotFit, constraints: Constraints, profile: SoftwareProfile = PLAIT_PROFILE) -> list[str]:
    """What a person may do, each a phrase, from what costs nothing to what changes the model."""
    workload, cluster = found.workload, found.cluster
    if constraints and _fits(workload, cluster, profile):
        return ["leave [layout] open"]
    tried = [
        *_shorter(workload, cluster, profile),
        *_more_devices(workload, cluster, profile),
        *_more_memory(found),
        *_smaller(workload, cluster, profile),
    ]
    return tried or ["take a smaller model.size"]


def error_with_suggestions(
    found: DoesNotFit, constraints: Constraints, profile: SoftwareProfile = PLAIT_PROFILE
) -> PlaitError:
    """The error that tells what is missing, and everything that would help."""
    if constraints:
        have = min(island.device.memory_bytes for island in found.cluster.islands)
        need = f"what [layout] asks for needs {format_bytes(found.least_bytes)} a device, and {found.smallest} has"
        return PlaitError(f"{need} {format_bytes(have)}; {', or '.join(fit_suggestions(found, constraints, profile))}")
    return PlaitError(f"{found}; cheapest first: {', or '.join(fit_suggestions(found, constraints, profile))}")


def _fits(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> bool:
    try:
        search(workload, cluster, profile=profile)
    except PlaitError:
        return False
    return True


def _shorter(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> Iterator[str]:
    """Shorter sequences, with as many tokens a step."""
    w = workload
    while w.sequence // 2 >= SHORTEST_SEQUENCE and w.sequence % 2 == 0:
        w = replace(w, sequence=w.sequence // 2, batch_sequences=w.batch_sequences * 2)
        if _fits(w, cluster, profile):
            yield f"train.sequence = {w.sequence}"
            return


def _more_devices(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> Iterator[str]:
    times = 2
    while times <= MOST_DEVICES:
        larger = replace(
            cluster, islands=tuple(replace(island, nodes=island.nodes * times) for island in cluster.islands)
        )
        # The batch grows along, so that every device has something to do.
        grown = replace(workload, batch_sequences=workload.batch_sequences * times)
        if _fits(grown, larger, profile):
            yield f"{times} times as many devices ({larger.n_devices})"
            return
        times *= 2


def _more_memory(found: DoesNotFit) -> Iterator[str]:
    have = min(island.device.memory_bytes for island in found.cluster.islands)
    larger = with_memory(found.cluster, 1.001 * found.least_bytes / have)
    if found.least_bytes < 16 * have and _fits(found.workload, larger, found.profile):
        yield f"devices with {format_bytes(found.least_bytes)} of memory"


def _smaller(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> Iterator[str]:
    for size in reversed(MODEL_SIZES):
        shape = named_shape(size, vocabulary=workload.vocabulary, sequence=workload.sequence)
        smaller = workload_of(
            shape,
            sequence=workload.sequence,
            batch_sequences=workload.batch_sequences,
            precision=workload.precision,
            attention=workload.attention,
            moments=workload.moments,
        )
        if smaller.parameters < workload.parameters and _fits(smaller, cluster, profile):
            yield f'model.size = "{size}" ({format_count(smaller.parameters)} parameters)'
            return
