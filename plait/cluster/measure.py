"""Looks at the devices and measures what they can do; runs in a worker, because it needs torch."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any, Protocol

import torch

from plait.cluster.catalog import reported_device
from plait.cluster.topology import Machine, this_host


class SendsMessages(Protocol):
    """What a rank needs of its context here: a way to answer."""

    def send(self, kind: str, **values: Any) -> None: ...


def rank(context: SendsMessages, argument: str) -> None:
    """Entry of the worker that describes this host: sends its fingerprint and its peak arithmetic rate."""
    machine = find_machine()
    flops, reason = machine_peak_flops(machine)
    context.send("machine", fingerprint=machine.fingerprint(), peak_flops=flops, reason=reason)


def find_machine() -> Machine:
    """This host with its GPUs, if torch sees any; where GPUs differ, the one with least memory stands for all."""
    host = this_host()
    if not torch.cuda.is_available():
        return host
    devices = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(index) for index in range(devices)]
    least = min(properties, key=lambda one: one.total_memory)
    return replace(
        host,
        device="cuda",
        name=least.name,
        devices=devices,
        memory_bytes=least.total_memory,
        unlike=tuple(dict.fromkeys(one.name for one in properties if one.name != least.name)),
    )


def machine_peak_flops(machine: Machine) -> tuple[float | None, str]:
    """The rate of all devices that MFU is a share of, in FLOP/s, and where it comes from; None when it is not known."""
    if machine.device == "cpu":
        rate = matmul_rate(threads=machine.cores)
        return rate, f"float32 matrix products measured on {machine.cores} cores"
    known = reported_device(machine.name)
    if known and (rate := known.peak_flops.get("bf16") or known.peak_flops.get("fp16")):
        return rate * machine.devices, f"dense 16-bit peak of {known.name}"
    return None, f"the peak of {machine.name} is not in plait's catalogue, so MFU is unknown"


def matmul_rate(*, threads: int, size: int = 1024, seconds: float = 0.8) -> float:
    """FLOP/s of float32 products of size × size matrices: the best quarter of repeated runs, as a limit should be."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 8:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        times.append(time.perf_counter() - start)
    torch.set_num_threads(before)
    best = sorted(times)[: max(1, len(times) // 4)]
    return 2 * size**3 / statistics.median(best)
