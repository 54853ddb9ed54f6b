"""What a result was measured on: processor, versions, commit, and the matmul rate that bounds every contender.

`python -m benchmarks.machine` prints it; with `--rate THREADS ARITHMETIC` it is the child that measures one rate.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import cast

import torch

from plait.machines.measured import Arithmetic
from plait.model.matmul import select_matmul_library

ROOT = Path(__file__).parent.parent
STAT = Path("/proc/stat")
RATE_SIZE = 1024
RATE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorSeconds:
    """Seconds that all processors together have been busy and idle since the machine started; zeros outside Linux."""

    busy_s: float
    idle_s: float
    stolen_s: float
    """Of the busy ones, those that a virtual machine was kept from."""

    @classmethod
    def now(cls) -> ProcessorSeconds:
        if not STAT.exists():
            return cls(busy_s=0.0, idle_s=0.0, stolen_s=0.0)
        ticks_a_second = os.sysconf("SC_CLK_TCK")
        seconds = [int(field) / ticks_a_second for field in STAT.read_text().split()[1:9]]
        idle_s, stolen_s = seconds[3] + seconds[4], seconds[7]  # nothing to do, or a disk to wait for
        return cls(busy_s=sum(seconds) - idle_s, idle_s=idle_s, stolen_s=stolen_s)


def describe() -> dict[str, object]:
    """The machine, the versions and the commit, as they stand in a results file."""
    names = ("torch", "numpy", "transformers", "accelerate", "tokenizers", "safetensors")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in names},
        "commit": commit(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a peer that this benchmark does without
        return "not installed"


def commit() -> str:
    """The commit of the working tree, "-dirty" behind it when files differ from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "none"
    return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")


def matmul_rates(threads: int) -> dict[str, float]:
    """Float32 matmul rate in FLOP/s: one process with 1 thread, one with `threads`, and `threads` of 1 together."""
    return {
        "1 process × 1 thread": matmul_rate(processes=1, threads=1),
        f"1 process × {threads} threads": matmul_rate(processes=1, threads=threads),
        f"{threads} processes × 1 thread": matmul_rate(processes=threads, threads=1),
    }


def matmul_rate(*, processes: int, threads: int, arithmetic: Arithmetic = "default") -> float:
    """Sum of the rates of processes that multiply at the same time, each with its own threads, in FLOP/s: float32 by
    torch's default library or by oneDNN, or bf16."""
    command = [sys.executable, "-m", "benchmarks.machine", "--rate", str(threads), arithmetic]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    children = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n", "the rate process did not start"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        return sum(float(child.communicate()[0]) for child in children)
    finally:
        for child in children:
            child.kill()
            child.wait()


def _measure_rate(threads: int, arithmetic: Arithmetic) -> None:
    torch.set_num_threads(threads)
    select_matmul_library("onednn" if arithmetic == "onednn" else "default")
    dtype = torch.bfloat16 if arithmetic == "bf16" else torch.float32
    left, right, product = (torch.randn(RATE_SIZE, RATE_SIZE).to(dtype) for _ in range(3))
    for _ in range(3):
        torch.mm(left, right, out=product)
    print("ready", flush=True)
    sys.stdin.readline()
    seconds: list[float] = []
    end = time.perf_counter() + RATE_SECONDS
    while (start := time.perf_counter()) < end:
        torch.mm(left, right, out=product)
        seconds.append(time.perf_counter() - start)
    fast = quantiles(seconds, n=10)[0]  # the rate is a bound: what slowed down most of the others is not the machine's
    print(2 * RATE_SIZE**3 / fast, flush=True)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else ""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rate"]:
        _measure_rate(int(sys.argv[2]), cast("Arithmetic", sys.argv[3]))
    else:
        print(json.dumps({**describe(), "matmul_flops": matmul_rates(os.cpu_count() or 1)}, indent=2))
