"""Finds this host's devices and measures what they can do; runs in a worker, because it needs torch."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any, Protocol

import torch

from plait.cluster.catalog import find_device_by_driver_name
from plait.cluster.topology import Machine, detect_cpu_machine


class MessageSender(Protocol):
    """What this module needs of a rank's context: a way to send messages to the supervisor."""

    def send(self, kind: str, **values: Any) -> None: ...


def rank(context: MessageSender, argument: str) -> None:
    """Entry of the worker that describes this host: sends the machine's fingerprint and its peak arithmetic rate."""
    machine = detect_machine()
    flops, reason = machine_peak_flops(machine)
    context.send("machine", fingerprint=machine.fingerprint(), peak_flops=flops, reason=reason)


def detect_machine() -> Machine:
    """This host with its GPUs, if torch sees any; where the GPUs differ, the one with the least memory stands for
    all."""
    host = detect_cpu_machine()
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
    """Peak FLOP/s of all devices together, of which MFU is a share, and a sentence on where the figure comes from;
    None where it is not known."""
    if machine.device == "cpu":
        rate = measure_matmul_flops(threads=machine.cores)
        return rate, f"float32 matrix products measured on {machine.cores} cores"
    known = find_device_by_driver_name(machine.name)
    # Without bf16 plait trains in float32 (planner/derive/training_job.py).
    precision = "bf16" if known and "bf16" in known.peak_flops else "float32"
    if known and precision in known.peak_flops:
        return known.flops(precision) * machine.devices, f"dense {precision} peak of {known.name}"
    return None, f"the peak of {machine.name} is not in plait's catalogue, so MFU is unknown"


def measure_matmul_flops(*, threads: int, size: int = 1024, seconds: float = 0.8) -> float:
    """FLOP/s of float32 products of size × size matrices: the median of the fastest quarter of repeated runs,
    because a peak is an upper limit."""
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
