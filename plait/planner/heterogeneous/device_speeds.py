"""How fast each device of a cluster works on a model: by what a probe timed on each host, else by the catalogue."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from plait.machines.cluster import Cluster, Island
from plait.machines.machine import make_names_unique
from plait.machines.measured import MeasuredDevice, Measurements
from plait.planner.problem.candidates import Candidates
from plait.planner.problem.software_profile import SoftwareProfile
from plait.planner.problem.stage_partition import head_cost_in_layers
from plait.planner.problem.workload import Workload
from plait.planner.step_time import measured_compute
from plait.planner.step_time.device_rates import device_rates
from plait.planner.step_time.device_time import DeviceTime, device_time_of, was_measured

EQUAL_SPEED_TOLERANCE = 0.05
"""Devices whose speeds differ by no more count as equal."""
MEASURED_TOKENS = 4096
"""Tokens of the micro-batch by which devices are compared: a usual one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeeds:
    """The devices of a cluster in the order of ranks, and how unequal they are."""

    speeds: tuple[float, ...]
    """Speed of each device relative to the reference device that the step-time model prices (1.0); all 1.0 where
    they differ by less than EQUAL_SPEED_TOLERANCE."""
    memory_bytes: tuple[int, ...]
    owner_of_device: tuple[int, ...]
    """For each device the index of its host or kind in `names`."""
    names: tuple[str, ...]
    """Names of the hosts where a probe has measured, else of the kinds of devices."""
    head_cost_in_layers: float
    """Time of the head and the loss, in units of an average layer."""
    embedding_cost_in_layers: float
    """Time of the embedding, in units of an average layer."""
    is_measured: bool
    """Whether a probe timed the layers, the head and the embedding."""

    @property
    def are_equal(self) -> bool:
        return len(set(self.speeds)) == 1

    @property
    def have_equal_memory(self) -> bool:
        return len(set(self.memory_bytes)) == 1

    @property
    def smallest(self) -> str:
        """The name of the smallest device in a sentence."""
        if self.have_equal_memory:
            return "the smallest device"
        least = min(range(len(self.memory_bytes)), key=lambda at: self.memory_bytes[at])
        return f"the smallest device ({self.names[self.owner_of_device[least]]})"


def device_speeds_of(workload: Workload, cluster: Cluster, profile: SoftwareProfile) -> DeviceSpeeds:
    """The devices of a cluster, compared by the time that each takes for one sequence through the whole model."""
    slowest = device_time_of(workload, cluster, profile)
    speeds = _measured_speeds(workload, cluster, slowest) or _catalogue_speeds(workload, cluster, slowest)
    head, lookup = (
        (head_cost_in_layers(workload), 0.0)
        if slowest.measured is None
        else _head_and_embedding_in_layers(slowest, slowest.measured)
    )
    return replace(speeds, head_cost_in_layers=head, embedding_cost_in_layers=lookup)


def _measured_speeds(w: Workload, cluster: Cluster, slowest: DeviceTime) -> DeviceSpeeds | None:
    """Speeds from a probe's clock, if it timed just these devices; each worker's own speed counts, not only its
    host's."""
    measured = cluster.measured
    if (
        not was_measured(w, cluster)
        or measured is None
        or sum(d.workers for d in measured.devices) != cluster.n_devices
    ):
        return None
    unit_s = _model_s(slowest)
    each: list[tuple[float, int]] = []
    for place, host in enumerate(measured.devices):
        own = unit_s / _model_s(replace(slowest, measured=host))
        each += [(own * rate / statistics.median(host.rates), place) for rate in host.rates]
    names = make_names_unique(tuple(host.host for host in measured.devices))
    tolerance = EQUAL_SPEED_TOLERANCE + _measurement_tolerance(measured)
    return _devices(cluster, each, names, tolerance)


def _measurement_tolerance(measured: Measurements) -> float:
    """Addition to EQUAL_SPEED_TOLERANCE: half of the median spread of the timed products, at most 0.1."""
    spreads = [one.spread for host in measured.devices for one in host.times_of("product")]
    return min(0.5 * statistics.median(spreads), 0.1) if spreads else 0.0


def _catalogue_speeds(w: Workload, cluster: Cluster, slowest: DeviceTime) -> DeviceSpeeds:
    """Speeds from the catalogue's figures; also used where a probe timed another number of devices."""
    formulas = replace(slowest, measured=None)
    unit_s = _model_s(formulas)

    def speed(island: Island) -> float:
        return unit_s / _model_s(
            replace(formulas, rates=device_rates(island.device, w.precision, slowest.profile, island.speed))
        )

    of_islands = [speed(island) for island in cluster.islands] if len(cluster.islands) > 1 else [1.0]
    each = [
        (own, place)
        for place, (own, island) in enumerate(zip(of_islands, cluster.islands, strict=True))
        for _ in range(island.n_devices)
    ]
    names = make_names_unique(tuple(island.device.name for island in cluster.islands))
    return _devices(cluster, each, names, EQUAL_SPEED_TOLERANCE)


def _devices(cluster: Cluster, each: list[tuple[float, int]], names: tuple[str, ...], tolerance: float) -> DeviceSpeeds:
    speeds = [speed for speed, _ in each]
    are_equal = max(speeds) <= (1 + tolerance) * min(speeds)
    return DeviceSpeeds(
        speeds=(1.0,) * len(each) if are_equal else tuple(speeds),
        memory_bytes=tuple(_memories(cluster)),
        owner_of_device=tuple(owner for _, owner in each),
        names=names,
        head_cost_in_layers=0.0,
        embedding_cost_in_layers=0.0,
        is_measured=cluster.measured is not None,
    )


def _memories(cluster: Cluster) -> Iterator[int]:
    for island in cluster.islands:
        yield from [island.device.memory_bytes] * island.n_devices


def _model_s(device: DeviceTime) -> float:
    """Seconds of one usual micro-batch, forward and backward, through all layers and the head."""
    layer, head = _parts_s(device)
    return device.workload.layers * layer + head


def _parts_s(device: DeviceTime) -> tuple[float, float]:
    w = device.workload
    usual = Candidates.from_rows([{"micro_sequences": max(1, min(w.batch_sequences, MEASURED_TOKENS // w.sequence))}])
    layer = device.layer_time(usual)
    return float((layer.forward + layer.backward)[0]), float(device.head_s(usual)[0])


def _head_and_embedding_in_layers(device: DeviceTime, clock: MeasuredDevice) -> tuple[float, float]:
    """Measured time of the head and of the embedding, in units of an average layer."""
    w = device.workload
    tokens = max(1, min(w.batch_sequences, MEASURED_TOKENS // w.sequence)) * w.sequence
    layer, both = _parts_s(device)
    lookup = float(measured_compute.embedding_s(clock, tokens, w.width, w.vocabulary))
    return (both - lookup) / layer, lookup / layer
