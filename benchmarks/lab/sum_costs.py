"""What summing 44 MB of gradients costs two one-thread ranks, without a model: `python -m benchmarks.lab.sum_costs`.

The best tenth of wall and CPU time over many repetitions; the ways take turns. See reduce_schedules.py for whole steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles

import torch
import torch.distributed as dist

from benchmarks.contender import leave

GRADIENTS = 11_000_000
RANKS = 2
REPETITIONS = 30


def rank_main(folder: Path) -> None:
    """One rank; rank 0 prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ways = _ways(folder)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(REPETITIONS):
        for name, way in ways.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            way()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    if dist.get_rank() == 0:
        print("| way | ms wall | ms CPU a rank |\n| --- | --- | --- |")
        for name, pairs in times.items():
            wall, cpu = (quantiles(values, n=10)[0] for values in zip(*pairs, strict=True))
            print(f"| {name} | {wall * 1e3:.1f} | {cpu * 1e3:.1f} |")
    dist.barrier()
    leave()


def _ways(folder: Path) -> dict[str, Callable[[], None]]:
    rank = dist.get_rank()
    mine = torch.from_file(str(folder / f"gradients-{rank}"), shared=True, size=GRADIENTS).zero_()
    dist.barrier()
    peer = torch.from_file(str(folder / f"gradients-{1 - rank}"), shared=True, size=GRADIENTS)
    ways: dict[str, Callable[[], None]] = {"one number": lambda: _all_reduce(torch.zeros(1), 1)}
    for mebibytes in (1, 2, 5, 10, 25, 64):
        ways[f"gloo, {mebibytes} MiB buckets"] = lambda size=mebibytes * 2**18: _all_reduce(mine, size)
    ways["shared memory"] = lambda: _sum_in_shared_memory(mine, peer)
    return ways


def _all_reduce(flat: torch.Tensor, size: int) -> None:
    works = [dist.all_reduce(bucket, async_op=True) for bucket in flat.split(size)]
    for work in works:
        assert work is not None
        work.wait()


def _sum_in_shared_memory(flat: torch.Tensor, peer: torch.Tensor) -> None:
    tick, middle = torch.zeros(1), flat.numel() // 2
    halves = (slice(0, middle), slice(middle, None))
    mine, other = halves[dist.get_rank()], halves[1 - dist.get_rank()]
    dist.all_reduce(tick)  # the peer's gradients are complete
    flat[mine] += peer[mine]
    dist.all_reduce(tick)  # the peer has summed its half
    flat[other] = peer[other]
    dist.all_reduce(tick)  # the peer has read this half; it may be overwritten


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        common = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        common.setdefault("MASTER_PORT", "29572")
        command = [sys.executable, "-m", "benchmarks.lab.sum_costs", folder]
        running = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(RANKS)]
        try:
            assert all(process.wait() == 0 for process in running), "a rank failed"
        finally:
            for process in running:
                process.kill()


if __name__ == "__main__":
    rank_main(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
