"""Whether all workers are on one machine, on devices of one kind: if so, equal shares are taken without measuring.

Machines that call themselves the same may still have unlike shares of a processor, so several are always measured.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from plait.accelerator import is_accelerator, module_of
from plait.custom.group import Workers
from plait.machines.machine import processor_name, usable_cores
from plait.parallel.exchange import gather_json

Kinds = Literal["alike", "unlike devices", "several hosts"]
NAME_CHARACTERS = 40
"""Of a host's name, which another machine tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKinds:
    """How the workers differ, and what to call each of them."""

    kinds: Kinds
    names: tuple[str, ...]


def compare_workers(workers: Workers) -> WorkerKinds:
    """Whether all workers are on one machine with the same device and threads. Every worker must call it; blocks."""
    if workers.size == 1:
        return WorkerKinds(kinds="alike", names=("the only worker",))
    # Hosts may bear one name: the first rank of each tells them apart.
    own = [platform.node(), workers.rank - workers.local_rank, _device_text(workers.device)]
    found = gather_json(own, workers.sums)
    hosts = [(str(name), int(first)) for name, first, _ in found]
    kinds: Kinds = "alike"
    if len(set(hosts)) > 1:
        kinds = "several hosts"
    elif len({device for _, _, device in found}) > 1:
        kinds = "unlike devices"
    return WorkerKinds(kinds=kinds, names=worker_names(hosts))


def worker_names(hosts: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """What to call each worker, from the name of its host and the first rank there: the host, where it is the only
    worker of that name, else its number, and the host where there are several names."""
    names = ["".join(letter for letter in name if letter.isprintable())[:NAME_CHARACTERS] for name, _ in hosts]
    several = len(set(names)) > 1
    return tuple(
        f"worker {rank}" if not several or not name else name if names.count(name) == 1 else f"worker {rank} on {name}"
        for rank, name in enumerate(names)
    )


def _device_text(device: torch.device) -> str:
    if is_accelerator(device):
        name: str = module_of(device).get_device_name(device)
        return name
    return f"{processor_name()}, {torch.get_num_threads()} threads of {usable_cores()} cores"
