"""What a run is laid out on: a machine, or several hosts that somebody looks at once the model is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256

from plait.cluster.catalog import reported_device
from plait.cluster.cluster import Cluster, cluster_of
from plait.cluster.measured import measured_json
from plait.cluster.topology import Machine
from plait.model.shape import ModelShape
from plait.partition.execution import Precision
from plait.planner.calibration.factors import UNTAUGHT, Basis, Calibration

STAND_IN = "A100"
"""What a GPU that is not in the catalogue is laid out as, with its own memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Workers that somebody else started, each with so many threads."""

    workers: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What somebody who looks at machines should know of the run."""

    shape: ModelShape
    batch_sequences: int
    precision: Precision


Look = Callable[[Need], Cluster]
"""Looks at several hosts and the roads between them, and describes them."""
Recall = Callable[[str, Basis], Calibration]
"""What earlier runs on these machines taught, by precision and what their forecasts came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounds:
    """What a run is laid out on: a machine, or several hosts of which `machine` is the first."""

    machine: Machine
    peak_flops: float | None
    """Of all devices together: measured of processors, published of GPUs, None of unknown ones."""
    given: Given | None = None
    look: Look | None = None
    """Where there are several hosts."""
    described: Cluster | None = None
    """What it saw."""
    recall: Recall = field(default=lambda precision, basis: UNTAUGHT)

    @property
    def known(self) -> bool:
        """Whether the planner knows what the devices can do."""
        return self.described is not None or self.machine.device == "cpu" or _in_catalogue(self.machine)

    @property
    def several(self) -> bool:
        """Whether there is more than one host."""
        return self.described is not None and self.described.nodes > 1

    def cluster(self, workers: int) -> Cluster:
        """The machines as so many devices."""
        if self.described:
            return self.described
        machine = self.machine if self.known else replace(self.machine, name=STAND_IN)
        return cluster_of(machine, self.peak_flops if machine.device == "cpu" else None, workers=workers)

    def looked_at(self, need: Need) -> Grounds:
        """The same with several hosts described."""
        return replace(self, described=self.look(need)) if self.look else self

    def threads(self, workers: int) -> int:
        return self.given.threads if self.given else max(1, self.machine.cores // workers)

    def worker_counts(self) -> list[int]:
        """How many workers there can be: GPUs, or a processor's cores dealt out in several ways."""
        machine = self.machine
        if self.given:
            return [self.given.workers]
        if machine.device == "cuda":
            return [machine.devices]
        powers = [2**k for k in range(machine.cores.bit_length()) if 2**k <= machine.cores]
        return sorted({*powers, machine.cores})


def digest_of(described: Cluster | None) -> str:
    """Tells one probe from another: what plans were made of; empty where nothing was probed."""
    measured = described.measured if described else None
    return sha256(measured_json(measured).encode()).hexdigest()[:16] if measured else ""


def _in_catalogue(machine: Machine) -> bool:
    return reported_device(machine.name) is not None
