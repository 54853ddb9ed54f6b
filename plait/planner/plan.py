"""The plan: all that will be done, resolved to the last number; written as plan.json and read by every worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from plait.devices import DEVICE_TRAITS, DeviceName
from plait.layout import Layout, equal_share
from plait.machines.cluster import Cluster
from plait.machines.machine import strip_name_number
from plait.model.shape import ModelShape
from plait.model.weights import hidden_matrix_numbers, trained_parameter_count
from plait.partition.execution import Execution, MatmulBackend, RunArithmetic
from plait.partition.matrix_owners import CopiesCompute
from plait.planner.calibration.factors import UNCALIBRATED, Calibration, ForecastBasis, StepItems
from plait.units import NEVER, Amount, Every

OptimizerKind = Literal["adamw", "muon", "sgd"]
LearningRateSchedule = Literal["cosine", "linear", "wsd", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerPlan:
    """The optimizer's numbers; `lr` is the peak of `schedule`, `clip` the largest gradient norm (None: no clipping).
    AdamW reads `betas`, SGD and Muon `momentum`; Muon updates hidden matrices, and AdamW all else."""

    lr: float
    warmup_steps: int
    weight_decay: float
    betas: tuple[float, float]
    clip: float | None
    schedule: LearningRateSchedule
    kind: OptimizerKind = "adamw"
    momentum: float = 0.0
    adamw_lr: float | None = None
    """AdamW's peak learning rate beside Muon, which falls as `lr` does; None: `lr`, and without Muon."""

    def state_numbers(self, shape: ModelShape) -> int:
        """Numbers of optimizer state for a model's weights."""
        matrices = hidden_matrix_numbers(shape)
        return self.moments * (trained_parameter_count(shape) - matrices) + self.matrix_moments * matrices

    @property
    def moments(self) -> int:
        """Tensors of optimizer state for each weight that is no hidden matrix: AdamW's two moments, or SGD's one
        momentum unless that is 0."""
        return int(self.momentum > 0) if self.kind == "sgd" else 2

    @property
    def matrix_moments(self) -> int:
        """Tensors of optimizer state for each weight of a hidden matrix: Muon's momentum alone, else as of others."""
        return 1 if self.kind == "muon" else self.moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The planner's forecast for a layout, also scaled to a few timed steps (resolve/resolve.py)."""

    step_s: float
    tensor_bytes: float
    """Peak on the fullest device of what its programs allocate."""
    bytes_per_device: float
    """Peak on the fullest device with what allocator, driver and process take on top of the tensors."""
    one_device_step_s: float | None
    """Seconds of the same batch on one of the devices alone; None where that device does not hold the model."""
    error: float
    """Relative error of `step_s`; layouts that differed by less counted as equally fast."""
    basis: ForecastBasis = "formulas"
    items: StepItems | None = None
    """The items that `step_s` consists of; None in plans of earlier versions."""
    calibration: Calibration = UNCALIBRATED
    """Factors that earlier runs taught, and timed steps; both are in `step_s` and `items` already."""
    probe_digest: str = ""
    """Digest of the probe of all hosts whose times these are; empty where there was none."""
    embedding_cost_in_layers: float = 0.0
    """Time of the embedding, in units of an average layer."""
    head_cost_in_layers: float | None = None
    """Time of the head and the loss, in units of an average layer; None in plans of earlier versions."""
    cluster: Cluster | None = field(default=None, compare=False, repr=False)
    """The devices of the layout as the cost model saw them, in the order of ranks: a change of the run can be priced
    with them later. None in plans of earlier versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """One host's part of a run over several: its ranks follow those of the hosts before it. Threads are per worker."""

    name: str
    workers: int
    threads: int
    machine: str = ""
    """Digest of the machine's hardware and software; empty where unknown."""
    mark: str = ""
    """Tells this machine from others of the same name; empty where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """The computation of a run, regardless of layout and machines; it stays the same when a run continues."""

    shape: ModelShape
    sequence: int
    batch_sequences: int
    """Sequences of one optimizer step, over all ranks."""
    budget: Amount
    steps: int
    """Follow from the budget; 0 until they do."""
    optimizer: OptimizerPlan
    base: str = ""
    """The folder of the model whose weights the run begins with; empty: they are drawn from the seed."""
    base_fingerprint: str = ""
    """Fingerprint of that model if an adapter is trained beside it; empty: there is none, or it was not taken."""
    corpus: str
    """The folder with the prepared tokens."""
    corpus_hash: str
    documents: Literal["mask", "join"]
    choices: str = ""
    """The file of multiple-choice questions that an evaluation asks; empty: none."""
    most_tokens: int | None = None
    """Tokens after which a run of a time budget stops, as its text has nothing left to teach; None: no such limit."""

    @property
    def batch_tokens(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.batch_sequences * self.sequence

    @property
    def ends_with_its_text(self) -> bool:
        """Whether a run of a time budget ends before that, as its text is learned."""
        return self.most_tokens is not None and self.steps * self.batch_tokens >= self.most_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How a job is laid out over its workers."""

    layout: Layout
    threads: int
    """Threads of each worker; `Machines.hosts` may say otherwise for each host."""
    micro_sequences: int
    """Sequences of a micro-batch, at most."""
    micro_limits: tuple[int, ...] = ()
    """Sequences of a micro-batch of each data-parallel rank, where devices' memories differ too much for one number;
    else empty."""
    shares: tuple[int, ...] = ()
    """Sequences per step of each data-parallel rank; empty where they are as equal as can be."""
    host_order: tuple[int, ...] = ()
    """The numbers of the hosts in the order of their ranks; one not among them is left out. Empty: all, as given."""
    copies_compute: CopiesCompute = "one for all"
    """Who orthogonalizes a matrix of which several ranks hold copies, where Muon does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The machines that a plan was made for."""

    device: DeviceName
    gpus: tuple[int, ...] = ()
    """torch's numbers of the GPUs that a host's workers use, in the order of their local ranks; empty: all."""
    hosts: tuple[HostShare, ...] = ()
    """The hosts in the order of their ranks; empty where the run never had more than one."""
    left_out: tuple[HostShare, ...] = ()
    """Hosts that joined and that the layout does not use; they have no ranks."""
    peak_flops: float | None
    """Arithmetic peak of all devices together, in FLOP/s; MFU is a share of it."""
    fingerprint: Mapping[str, Any]
    """Identifies the machine that the plan was made on."""

    @property
    def have_accelerators(self) -> bool:
        """Whether they train on GPUs, with one worker each, and not on their processors."""
        return DEVICE_TRAITS[self.device].is_accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """How often a run does what it does beside training."""

    checkpoint_every: Every
    checkpoint_keep: int
    """The newest checkpoints that stay, at least."""
    checkpoint_keep_s: float = 0.0
    """Checkpoints younger than this stay, too."""
    copy_every: Every = NEVER
    """How often a worker's state is copied into memory that outlives it."""
    copy_bytes: int = 0
    """Memory of one host for all its workers' copies."""
    report_every_steps: int
    evaluate_every_steps: int
    """0: only at the end."""
    balance_every_steps: int = 0
    """How often shares may change while the run goes on; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a run will do, with no "auto" left. Workers read the layout from here and nowhere else."""

    job: TrainingJob
    placement: Placement
    arithmetic: RunArithmetic
    machines: Machines
    cadence: Cadence
    forecast: Forecast | None
    """None where the device is not in the catalogue."""
    step_s: float | None
    """Seconds of a step, measured when the plan was made; None where none was timed."""
    recipe_hash: str
    reasons: tuple[str, ...]
    """One sentence for each thing that plait chose."""
    faster_arithmetic: str = ""
    """Arithmetic that is faster than a CPU's default, in one line; empty if none is."""
    warnings: tuple[str, ...] = ()
    """Warnings that are always shown before the run."""

    @property
    def execution(self) -> Execution:
        """The part of the plan that a model needs to be run in parallel."""
        return Execution(
            layout=self.placement.layout,
            shape=self.job.shape,
            device=self.machines.device,
            arithmetic=self.arithmetic,
            whole_updates="hidden matrices" if self.job.optimizer.kind == "muon" else "none",
        )

    @property
    def batch_tokens(self) -> int:
        return self.job.batch_tokens

    @property
    def sequences_per_replica(self) -> tuple[int, ...]:
        """Sequences per step of each data-parallel rank, in the order of the samples."""
        count = self.placement.layout.data_parallel_degree
        batch = self.job.batch_sequences
        return self.placement.shares or tuple(equal_share(batch, count, part)[1] for part in range(count))

    @property
    def world_size(self) -> int:
        return self.placement.layout.world_size

    @property
    def devices(self) -> int:
        """Number of devices for device-hours: GPUs, or machines that compute on their processor."""
        return self.world_size if self.machines.have_accelerators else max(1, len(self.machines.hosts))

    def threads_of(self, rank: int) -> int:
        """Threads of one rank."""
        hosts = [host for host in self.machines.hosts for _ in range(host.workers)]
        return hosts[rank].threads if hosts else self.placement.threads

    def matmul_backend_of(self, rank: int) -> MatmulBackend:
        """The library by which one rank multiplies float32 matrices."""
        hosts = [host for host in self.machines.hosts for _ in range(host.workers)]
        usual = self.arithmetic.matmul_backend
        return self.arithmetic.host_backends.get(hosts[rank].machine, usual) if hosts else usual

    def gpu_of(self, local_rank: int) -> int:
        """torch's number of the GPU of a rank on its host."""
        return self.machines.gpus[local_rank] if self.machines.gpus else local_rank

    def workers_beside(self, rank: int) -> int:
        """Workers on the host of one rank, itself included."""
        homes = [place for place, host in enumerate(self.machines.hosts) for _ in range(host.workers)]
        return homes.count(homes[rank]) if homes else self.world_size


def same_hosts(some: Sequence[HostShare], others: Sequence[HostShare]) -> bool:
    """Whether both lists have machines of the same kinds in the same order; names may differ."""
    pairs = list(zip(some, others, strict=False))
    like = all((one.workers, one.threads) == (other.workers, other.threads) for one, other in pairs)
    known = [(one.machine, other.machine) for one, other in pairs if one.machine and other.machine]
    return len(some) == len(others) and like and all(one == other for one, other in known)


def refreshed_hosts(previous: Sequence[HostShare], now: Sequence[HostShare]) -> tuple[HostShare, ...] | None:
    """A plan's hosts with their present names and marks; None where `now` are other machines.

    Hosts are the same if everything but the marks is equal (a new network card changes a mark), or if all marks are
    equal. In the second case names keep the plan's numbers, since hosts of one name are numbered in order of arrival.
    """
    if without_marks(previous) == without_marks(now):
        return tuple(now)
    marks = [host.mark for host in previous]
    if not all(marks) or marks != [host.mark for host in now] or not same_hosts(previous, now):
        return None
    renamed = [
        strip_name_number(one.name) != strip_name_number(other.name) for one, other in zip(previous, now, strict=True)
    ]
    return tuple(now if any(renamed) else previous)


def without_marks(hosts: Sequence[HostShare]) -> tuple[HostShare, ...]:
    """The hosts with empty marks, for comparison."""
    return tuple(replace(host, mark="") for host in hosts)
