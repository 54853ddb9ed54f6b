"""A short check of machines: its findings, and the verdict in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import isfinite

from plait.checked_json import SingleLine
from plait.probing.answer import PairTiming, ProbedHost, find_slow_parts
from plait.units import counted, format_bytes, format_duration, format_si

LEAST_MEMORY_BYTES_PER_WORKER = 2**29
"""A worker's process with torch loaded takes about half of this, before it holds a model."""
LEAST_DISK_BYTES = 2**30
"""Room for the prepared text and two checkpoints of a small model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """One host as its first rank finds it."""

    device: SingleLine
    """Name of its processor or of its GPUs."""
    memory_bytes: int
    """Memory of the host, not of its GPUs."""
    free_memory_bytes: int
    free_disk_bytes: int
    """The folder that contains runs/."""
    python: SingleLine
    torch: SingleLine
    plait: SingleLine

    def __post_init__(self) -> None:
        if not 0 <= self.free_memory_bytes <= self.memory_bytes or self.free_disk_bytes < 0:
            raise ValueError("HostState has impossible bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCheck:
    """All that the ranks of a check found; a rank or a link that is dead ends the check before there is one."""

    hosts: tuple[ProbedHost, ...]
    states: tuple[HostState, ...]
    """One for each host."""
    pairs: tuple[PairTiming, ...]
    sum_bytes: int
    """Bytes that each rank gave into the all-reduce."""
    sum_s: float
    """Seconds of one all-reduce."""
    sum_error: float
    """Largest difference of its result from the sum that was expected; 0 where it is right."""

    def __post_init__(self) -> None:
        if len(self.hosts) != len(self.states) or not all(host.ranks for host in self.hosts):
            raise ValueError("MachineCheck.hosts and its states differ")
        if not (isfinite(self.sum_s) and self.sum_s >= 0):
            raise ValueError("MachineCheck.sum_s is no time")

    @property
    def workers(self) -> int:
        """Number of ranks over all hosts."""
        return sum(len(host.ranks) for host in self.hosts)


def check_faults(found: MachineCheck) -> tuple[str, ...]:
    """One sentence that says what to do for each thing that keeps these machines from training; empty where they are
    ready."""
    faults: list[str] = []
    if found.sum_error:
        faults.append(
            f"the all-reduce over {counted(found.workers, 'worker')} gives a wrong sum, off by {found.sum_error:.2g}; "
            "update the driver and torch, or leave out one device after the other to find the one that is broken"
        )
    for host, state in zip(found.hosts, found.states, strict=True):
        if state.free_memory_bytes < len(host.ranks) * LEAST_MEMORY_BYTES_PER_WORKER:
            faults.append(
                f"{host.name} has only {format_bytes(state.free_memory_bytes)} of memory free for "
                f"{counted(len(host.ranks), 'worker')}; end other programs there, or use fewer workers"
            )
        if state.free_disk_bytes < LEAST_DISK_BYTES:
            faults.append(
                f"{host.name} has only {format_bytes(state.free_disk_bytes)} of disk free where runs/ lies; "
                "free some space, or work in a folder on another disk"
            )
    first = found.states[0]
    for host, state in zip(found.hosts[1:], found.states[1:], strict=True):
        for name, here, there in (
            ("plait", first.plait, state.plait),
            ("torch", first.torch, state.torch),
        ):
            if here != there:
                faults.append(
                    f"{host.name} has {name} {there} and {found.hosts[0].name} has {here}; install the same on both"
                )
    return tuple(faults)


def check_text(found: MachineCheck) -> str:
    """The check's lines, the verdict last."""
    slow = find_slow_parts(found.hosts, {}, found.pairs)
    faults = check_faults(found)
    lines = [
        _devices_line(found),
        _links_line(found.pairs),
        _sum_line(found),
        *chain.from_iterable(
            _host_lines(host, state, len(found.hosts)) for host, state in zip(found.hosts, found.states, strict=True)
        ),
        *(f"slow     {sentence}" for sentence in slow),
    ]
    return "\n".join([*lines, verdict_line(faults, "slow" if slow else "even")])


def verdict_line(faults: tuple[str, ...], links: str) -> str:
    """The last line of a check."""
    if faults:
        return "verdict  not ready: " + "; and ".join(faults)
    return f"verdict  ready to train{', though a slow link will cost time' if links == 'slow' else ''}"


def _devices_line(found: MachineCheck) -> str:
    several = [
        f"{counted(len(host.ranks), 'worker')} on {state.device}"
        for host, state in zip(found.hosts, found.states, strict=True)
    ]
    return f"devices  {', '.join(several)}: each computes right"


def _links_line(pairs: tuple[PairTiming, ...]) -> str:
    if not pairs:
        return "links    none: there is one worker"
    slowest = max(pairs, key=lambda pair: pair.points[-1].seconds / pair.points[-1].bytes)
    rate = slowest.points[-1].bytes / slowest.points[-1].seconds
    latency_s = max(pair.points[0].seconds for pair in pairs)
    which = "the link answers" if len(pairs) == 1 else f"all {len(pairs)} answer; the slowest has"
    tail = f"{format_si(8 * rate, 'bit/s')}, {format_duration(latency_s)} for a short message"
    return f"links    {which}{':' if len(pairs) == 1 else ''} {tail}"


def _sum_line(found: MachineCheck) -> str:
    if found.workers == 1:
        return "sums     none: there is one worker"
    right = "is wrong" if found.sum_error else "is right"
    return (
        f"sums     an all-reduce of {format_bytes(found.sum_bytes)} over {counted(found.workers, 'worker')} {right} "
        f"and takes {format_duration(found.sum_s)}"
    )


def _host_lines(host: ProbedHost, state: HostState, hosts: int) -> tuple[str, ...]:
    where = f"{host.name}: " if hosts > 1 else ""
    memory = f"{format_bytes(state.free_memory_bytes)} of {format_bytes(state.memory_bytes)} free"
    versions: Mapping[str, str] = {"plait": state.plait, "torch": state.torch, "Python": state.python}
    return (
        f"memory   {where}{memory}",
        f"disk     {where}{format_bytes(state.free_disk_bytes)} free where runs/ lies",
        f"software {where}{', '.join(f'{name} {number}' for name, number in versions.items())}",
    )
