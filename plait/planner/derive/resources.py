"""The planner's resources: this machine, several hosts that are probed later, or a cluster on paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Literal

from plait.devices import ON_PAPER, DeviceName
from plait.machines.catalog import Device, find_device_by_driver_name
from plait.machines.cluster import Cluster, cluster_of_machine, with_share_of_cores
from plait.machines.machine import Machine
from plait.machines.measured import measurements_json
from plait.machines.requested_workers import ANY_WORKERS, RequestedWorkers
from plait.model.parts.mixture import MixtureShape
from plait.model.shape import ModelShape
from plait.partition.execution import Compile, MatmulBackend, Precision
from plait.planner.calibration.factors import UNCALIBRATED, Calibration, ForecastBasis
from plait.planner.derive.arithmetic import ProcessorArithmetic
from plait.planner.step_time.device_rates import peak_flops

STAND_IN = "A100"
"""Device that stands in for a GPU that is not in the catalogue; the GPU's own memory is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedWorkers:
    """Workers that somebody else started, each with this many threads."""

    workers: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeNeed:
    """The facts about a run that a probe of several hosts needs."""

    shape: ModelShape
    batch_sequences: int
    precision: Precision
    matmul_backend: MatmulBackend = "default"
    host_backends: Mapping[str, MatmulBackend] = field(default_factory=dict[str, MatmulBackend])
    """The library of hosts that take another one, by the digest of their machine."""
    compile: Compile = "off"


Probe = Callable[[ProbeNeed], Cluster]
"""Measures several hosts and the links between them, and describes them as a cluster."""
LoadCalibration = Callable[[str, ForecastBasis], Calibration]
"""Looks up the factors that earlier runs on these machines taught, by precision and by basis of the forecast."""
LoadExpertLoad = Callable[[MixtureShape], float | None]
"""Looks up the load of the busiest expert, over the mean, that the last run of such a mixture measured; None where none
did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The planner's resources: this machine, several hosts of which `machine` is the leader, or a cluster on paper."""

    machine: Machine
    peak_flops: float | None
    """FLOP/s of all devices together: measured of processors, published of GPUs, None of unknown ones."""
    others: tuple[Machine, ...] = ()
    """The machines of the run's other hosts: what one of all cannot do, none is asked to do."""
    peak_doubt: str = ""
    """A sentence on why the peak is doubtful; empty if it is not."""
    fixed_workers: FixedWorkers | None = None
    requested: RequestedWorkers = ANY_WORKERS
    """Workers and threads as the recipe names them."""
    probe: Probe | None = None
    """Measures several hosts; None where there is one."""
    cluster: Cluster | None = None
    """The probe's results, or the cluster on paper."""
    devices_used: Literal["all", "some"] = "some"
    """Whether a layout must use all devices, or may leave some out where that is allowed at all."""
    is_here: bool = True
    """Whether the machines exist and are reachable; False for a cluster that is only described."""
    arithmetic: ProcessorArithmetic | None = None
    """How the processors multiply, where it was measured for this run; None elsewhere, and on GPUs."""
    load_calibration: LoadCalibration = field(default=lambda precision, basis: UNCALIBRATED)
    load_expert_load: LoadExpertLoad = field(default=lambda mixture: None)
    """Independent of the machines: loads depend on the model and its text alone."""

    @property
    def machines(self) -> tuple[Machine, ...]:
        """The machines of all hosts, the leader's first; for a cluster on paper, the stand-in for all."""
        return (self.machine, *self.others)

    @property
    def has_known_devices(self) -> bool:
        """Whether the planner knows what the devices can do."""
        return (
            self.cluster is not None
            or self.machine.device == "cpu"
            or find_device_by_driver_name(self.machine.name) is not None
        )

    @property
    def known_devices(self) -> tuple[Device, ...]:
        """The devices of the catalogue, or of a cluster.json, that there are; none on a processor that is not
        described."""
        if self.cluster:
            return tuple(island.device for island in self.cluster.islands)
        known = find_device_by_driver_name(self.machine.name)
        return (known,) if known else ()

    @property
    def may_leave_devices_out(self) -> bool:
        """Whether a layout may use only some of the machines or GPUs. Those that torchrun started all take part, and so
        do processors of hosts that were not measured (--no-timing): the leader may be one that seems of no use. A
        processor's workers are no devices of their own."""
        is_measured = self.cluster is not None and self.cluster.measured is not None
        if self.others and not self.machine.has_accelerators and not is_measured:
            return False
        has_gpus = self.machine.has_accelerators and self.fixed_workers is None
        return self.devices_used == "some" and self.has_known_devices and (self.cluster is not None or has_gpus)

    def as_cluster(self, workers: int) -> Cluster:
        """The machines as a cluster of this many devices."""
        if self.cluster:
            return self.cluster
        machine = self.machine if self.has_known_devices else replace(self.machine, name=STAND_IN)
        here = cluster_of_machine(machine, self.peak_flops if machine.device == "cpu" else None, workers=workers)
        return with_share_of_cores(here, self.requested.share_of(machine, workers))

    def probed(self, need: ProbeNeed) -> Resources:
        """These resources with the cluster that a probe of the hosts measured; unchanged for a single host."""
        return replace(self, cluster=self.probe(need)) if self.probe else self

    def with_arithmetic(self, arithmetic: ProcessorArithmetic) -> Resources:
        """These resources with the arithmetic that was chosen for their processors, and its peak."""
        gain = arithmetic.gain / (self.arithmetic.gain if self.arithmetic else 1.0)
        peak = None if self.peak_flops is None else self.peak_flops * gain
        return replace(self, arithmetic=arithmetic, peak_flops=peak)

    def threads(self, workers: int) -> int:
        """Threads of each of this many workers."""
        if self.fixed_workers and self.requested.threads == "auto":
            return self.fixed_workers.threads
        return self.requested.threads_of_each(self.machine, workers)

    def worker_counts(self) -> list[int]:
        """How many workers there can be: the GPUs, or a processor's cores divided in several ways."""
        machine = self.machine
        if self.fixed_workers:
            return [self.fixed_workers.workers]
        return [machine.devices] if self.cluster else self.requested.worker_counts(machine)


def on_paper(
    cluster: Cluster,
    load_calibration: LoadCalibration = lambda precision, basis: UNCALIBRATED,
    load_expert_load: LoadExpertLoad = lambda mixture: None,
) -> Resources:
    """A cluster that need not be there. One processor in it makes it a cluster of processors."""
    kinds = {island.device.kind for island in cluster.islands}
    device: DeviceName = "cpu" if "cpu" in kinds else ON_PAPER
    has_bf16 = all("bf16" in island.device.peak_flops for island in cluster.islands)
    precision = "bf16" if device == ON_PAPER and has_bf16 else "float32"
    memory = min(int(island.device.memory_bytes) * island.per_node for island in cluster.islands)
    machine = Machine(
        device=device, name=cluster.name, devices=cluster.n_devices, cores=1, memory_bytes=memory, versions=()
    )
    return Resources(
        machine=machine,
        peak_flops=sum(island.n_devices * peak_flops(island.device, precision) for island in cluster.islands),
        cluster=cluster,
        is_here=False,
        load_calibration=load_calibration,
        load_expert_load=load_expert_load,
    )


def probe_digest(cluster: Cluster | None) -> str:
    """Hash of the probe's results, which a plan records; empty where nothing was probed."""
    measured = cluster.measured if cluster else None
    return sha256(measurements_json(measured).encode()).hexdigest()[:16] if measured else ""
