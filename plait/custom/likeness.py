"""Whether all workers are on one machine, on devices of one kind: if so, equal shares are taken without measuring.

Machines that call themselves the same may still have unlike shares of a processor, so several are always measured.
"""

from __future__ import annotations

import platform
from hashlib import sha256
from pathlib import Path

import torch

from plait.cluster.topology import usable_cores
from plait.custom.group import Workers


def workers_are_alike(workers: Workers) -> bool:
    """Whether all workers are on one machine with the same device and threads. Every worker must call it; blocks."""
    if workers.size == 1:
        return True
    digest = sha256(f"{platform.node()}: {_device_text(workers.device)}".encode()).digest()[:7]
    found = workers.sums.gather(torch.tensor([int.from_bytes(digest, "big")]))
    return len({int(one) for one in found}) == 1


def _device_text(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor_name()}, {torch.get_num_threads()} threads of {usable_cores()} cores"


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
