"""What a recipe's [run] asks of one machine: which devices, how many workers, how many threads each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from plait.devices import NamedDevice
from plait.errors import PlaitError
from plait.machines.machine import Machine
from plait.units import counted

RequestedDevices = Literal["auto"] | NamedDevice | tuple[int, ...]
"""All accelerators that torch sees, else the processor ("auto"); one kind of device; or GPUs by torch's numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedWorkers:
    """Devices, workers and threads of each worker, as far as the recipe names them."""

    devices: RequestedDevices = "auto"
    workers: int | Literal["auto"] = "auto"
    threads: int | Literal["auto"] = "auto"

    @property
    def is_open(self) -> bool:
        """Whether the recipe leaves workers and threads to the planner."""
        return self.workers == self.threads == "auto"

    def worker_counts(self, machine: Machine) -> list[int]:
        """How many workers there can be on a machine: the GPUs, or a processor's cores divided in several ways."""
        if self.workers != "auto":
            return [self.workers]
        if machine.has_accelerators:
            return [machine.devices]
        most = machine.cores // self.threads if self.threads != "auto" else machine.cores
        powers = [2**k for k in range(most.bit_length()) if 2**k <= most]
        return sorted({*powers, most})

    def threads_of_each(self, machine: Machine, workers: int) -> int:
        """Threads of each of this many workers of a machine."""
        return self.threads if self.threads != "auto" else max(1, machine.cores // workers)

    def share_of(self, machine: Machine, workers: int) -> float:
        """The part of a processor's arithmetic that this many workers have; 1 where their number or threads are
        open."""
        if self.is_open or machine.has_accelerators:
            return 1.0
        return min(1.0, workers * self.threads_of_each(machine, workers) / machine.cores)


ANY_WORKERS = RequestedWorkers()
"""A request that leaves devices, workers and threads open."""

PeakNeed = Literal["measured", "as known"]
"""Whether a machine's peak arithmetic rate is wanted. Measuring a processor's takes a second or two, and a run that
goes on by its plan needs none."""


PEAK_S = 1.6
"""Seconds of measuring a processor's peak at most, while other programs run; on a quiet machine it takes less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyRequest:
    """The question to the worker that describes a host."""

    requested: RequestedWorkers = ANY_WORKERS
    peak: PeakNeed = "measured"
    peak_s: float = PEAK_S
    """Seconds of measuring it at most."""

    def to_json(self) -> str:
        """The request as JSON, as that worker reads it."""
        return json.dumps(asdict(self))


def chosen_gpus(requested: RequestedWorkers, present: int) -> tuple[int, ...]:
    """The numbers of the GPUs to use of those that torch sees; none for the processor. Raises PlaitError for a GPU that
    is not there, and for more workers than GPUs."""
    if requested.devices == "cpu":
        return ()
    gpus = requested.devices if isinstance(requested.devices, tuple) else tuple(range(present))
    if missing := [str(gpu) for gpu in gpus if gpu >= present]:
        raise PlaitError(f"run.devices names GPU {missing[0]}, and {_gpus_text(present)}")
    if requested.workers == "auto" or not gpus:
        return gpus
    if requested.workers > len(gpus):
        raise PlaitError(
            f"run.workers = {requested.workers} are more than the {counted(len(gpus), 'GPU')} to use, and each GPU has "
            f'one worker; choose at most {len(gpus)}, or "auto"'
        )
    return gpus[: requested.workers]


def _gpus_text(present: int) -> str:
    if not present:
        return 'torch sees none on this machine; write run.devices = "cpu" or "auto"'
    numbers = "only GPU 0" if present == 1 else f"GPUs 0 to {present - 1}"
    return f'torch sees {numbers} on this machine; choose of these, or write "auto"'


def check_requested_workers(requested: RequestedWorkers, machine: Machine, where: str = "this machine") -> None:
    """Raise PlaitError where a machine has fewer cores than its workers and their threads want."""
    workers, threads, cores = requested.workers, requested.threads, counted(machine.cores, "core")
    if threads != "auto" and threads > machine.cores:
        raise PlaitError(
            f'run.threads = {threads} are more than {where} has, {cores}; choose at most {machine.cores}, or "auto"'
        )
    if workers == "auto":
        return
    if not machine.has_accelerators and workers > machine.cores:
        raise PlaitError(
            f'run.workers = {workers} are more than {where} has, {cores}; choose at most {machine.cores}, or "auto"'
        )
    if threads != "auto" and workers * threads > machine.cores:
        raise PlaitError(
            f"run.workers = {workers} with run.threads = {threads} want {workers * threads} cores, and {where} has "
            f'{machine.cores}; lower one of them, or write "auto"'
        )
