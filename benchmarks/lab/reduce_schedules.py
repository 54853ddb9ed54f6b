"""When, and in what buckets, two one-thread ranks should sum gradients: `python -m benchmarks.lab.reduce_schedules`.

One pair of ranks on one model takes each schedule right beside a step that sums nothing, and only pairs of steps during
which other programs left the machine alone count; the ratios are of such pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from benchmarks.contender import Orders, leave
from benchmarks.machine import ProcessorSeconds
from benchmarks.peers.ddp_loop import GPT2, Windows, build_optimizer
from benchmarks.workload import FIRST_RUN, prepare

MIB = 2**20
RANKS = 2
QUIET = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How gradients are summed: nothing, or buckets of a size, while the backward pass runs or once it has ended."""

    when: Literal["never", "during", "after", "shared memory"]
    bucket_mib: int = 64

    def __str__(self) -> str:
        return self.when if self.when in ("never", "shared memory") else f"{self.when}, {self.bucket_mib} MiB"


NEVER = Schedule(when="never")
SCHEDULES = [
    NEVER,
    *(Schedule(when="during", bucket_mib=size) for size in (1, 5, 10, 25)),
    *(Schedule(when="after", bucket_mib=size) for size in (5, 25, 64)),
    Schedule(when="shared memory"),
]


class FlatGradients:
    """Every gradient as a view into one flat buffer, the last parameters' first, as the backward pass fills it."""

    def __init__(self, parameters: list[nn.Parameter], folder: Path) -> None:
        self.parameters = list(reversed(parameters))
        count = sum(parameter.numel() for parameter in parameters)
        mine, other = (folder / f"gradients-{rank}" for rank in (dist.get_rank(), 1 - dist.get_rank()))
        self.flat = torch.from_file(str(mine), shared=True, size=count)
        dist.barrier()
        self.peer = torch.from_file(str(other), shared=True, size=count)
        offset = 0
        self.ends: list[int] = []
        for parameter in self.parameters:
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            self.ends.append(offset)

    def buckets(self, mebibytes: int) -> list[tuple[int, int, int]]:
        """(start, end, number of parameters) of consecutive buckets of at least the given size."""
        found: list[tuple[int, int, int]] = []
        start = members = 0
        for end in self.ends:
            members += 1
            if (end - start) * 4 >= mebibytes * MIB or end == self.ends[-1]:
                found.append((start, end, members))
                start, members = end, 0
        return found


def step_with(schedule: Schedule, gradients: FlatGradients, backward: Callable[[], None]) -> tuple[float, float]:
    """One backward pass with its sums; returns the wall and CPU seconds of the whole."""
    wall, cpu = time.perf_counter(), time.process_time()
    gradients.flat.zero_()
    handles: list[torch.utils.hooks.RemovableHandle] = []
    works: list[dist.Work] = []
    if schedule.when == "during":
        handles = _hook(gradients, schedule.bucket_mib, works)
    backward()
    if schedule.when == "after":
        for start, end, _ in gradients.buckets(schedule.bucket_mib):
            works.append(_sum(gradients.flat[start:end]))
    elif schedule.when == "shared memory":
        _sum_in_shared_memory(gradients)
    for work in works:
        work.wait()
    for handle in handles:
        handle.remove()
    return time.perf_counter() - wall, time.process_time() - cpu


def _hook(gradients: FlatGradients, mebibytes: int, works: list[dist.Work]) -> list[torch.utils.hooks.RemovableHandle]:
    handles: list[torch.utils.hooks.RemovableHandle] = []
    first = 0
    for start, end, members in gradients.buckets(mebibytes):
        missing = [members]

        def ready(_: torch.Tensor, start: int = start, end: int = end, missing: list[int] = missing) -> None:
            missing[0] -= 1
            if missing[0] == 0:
                works.append(_sum(gradients.flat[start:end]))

        for parameter in gradients.parameters[first : first + members]:
            handles.append(parameter.register_post_accumulate_grad_hook(ready))
        first += members
    return handles


def _sum(bucket: torch.Tensor) -> dist.Work:
    work = dist.all_reduce(bucket, async_op=True)
    assert work is not None
    return work


def _sum_in_shared_memory(gradients: FlatGradients) -> None:
    tick = torch.zeros(1)
    middle = gradients.flat.numel() // 2
    halves = (slice(0, middle), slice(middle, None))
    mine, other = halves[dist.get_rank()], halves[1 - dist.get_rank()]
    dist.all_reduce(tick)  # the peer's gradients are complete
    gradients.flat[mine] += gradients.peer[mine]
    dist.all_reduce(tick)  # the peer has summed its half
    gradients.flat[other] = gradients.peer[other]
    dist.all_reduce(tick)  # the peer has read its copy of this half; it may be overwritten


def rank_main(workdir: Path, out: Path, rounds: int, limit_s: float) -> None:
    """One rank: a round to warm up, then rounds until every schedule has its `rounds` quiet pairs or time is up."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    orders = Orders(workdir=workdir, steps=1, threads=1, precision="float32", rank=dist.get_rank(), world_size=RANKS)
    model = GPT2(FIRST_RUN)
    model.load_state_dict(load_file(workdir / "init.safetensors"))
    gradients = FlatGradients(list(model.parameters()), workdir)
    optimizer = build_optimizer(model, FIRST_RUN)
    windows = Windows(workdir, FIRST_RUN, orders)
    pairs: dict[str, list[list[float]]] = {str(schedule): [] for schedule in SCHEDULES}
    tries = 0
    end = time.monotonic() + limit_s
    while not _agreed(time.monotonic() > end) and any(len(each) < rounds for each in pairs.values()):
        tries += 1
        for schedule in SCHEDULES:
            if len(pairs[str(schedule)]) < rounds:
                order = (NEVER, schedule) if tries % 2 else (schedule, NEVER)
                pair, others = timed_pair(order, gradients, lambda: model(*windows(0)).backward())
                optimizer.step()
                if tries > 1 and others < QUIET:
                    pairs[str(schedule)].append(pair if tries % 2 else pair[2:] + pair[:2])
    out.write_text(json.dumps(pairs))
    leave()


def _agreed(here: bool) -> bool:
    """Whether any rank says so: their clocks differ, and all must leave the loop together."""
    anywhere = torch.tensor([float(here)])
    dist.all_reduce(anywhere)
    return anywhere.item() > 0


def timed_pair(
    order: tuple[Schedule, Schedule], gradients: FlatGradients, backward: Callable[[], None]
) -> tuple[list[float], float]:
    """Wall and CPU seconds of either step, the slower rank's, and the share that others took of the machine."""
    before = ProcessorSeconds.now()
    seconds: list[float] = []
    for schedule in order:
        dist.all_reduce(torch.zeros(1))
        seconds += step_with(schedule, gradients, backward)
    after = ProcessorSeconds.now()
    own_cpu_s = torch.tensor([seconds[1] + seconds[3]])
    slower = torch.tensor(seconds)
    dist.all_reduce(own_cpu_s)
    dist.all_reduce(slower, op=dist.ReduceOp.MAX)
    busy_s = after.busy_s - before.busy_s
    share = torch.tensor([(busy_s - own_cpu_s.item()) / (busy_s + after.idle_s - before.idle_s)])
    dist.broadcast(share, 0)
    return slower.tolist(), share.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--minutes", type=float, default=8, help="the most it may take while the machine is busy")
    parser.add_argument("--rank-out", type=Path)
    parser.add_argument("--workdir", type=Path)
    flags = parser.parse_args()
    if flags.rank_out:
        rank_main(flags.workdir, flags.rank_out, flags.rounds, flags.minutes * 60)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        prepare(FIRST_RUN, Path(folder), steps=1, world_size=RANKS)
        answers = _start_ranks(Path(folder), flags.rounds, flags.minutes)
    print("| schedule | pairs | ms alone | ms more | wall ÷ alone | least … greatest | CPU ÷ alone |")
    print("| --- " * 7 + "|")
    for name, pairs in answers[0].items():
        if pairs:
            print(_row(name, pairs))


def _row(name: str, pairs: list[list[float]]) -> str:
    alone, wall, cpu = [pair[0] for pair in pairs], [pair[2] / pair[0] for pair in pairs], [p[3] / p[1] for p in pairs]
    more = median(pair[2] - pair[0] for pair in pairs)
    bounds = f"{min(wall):.3f} … {max(wall):.3f}"
    return (
        f"| {name} | {len(pairs)} | {median(alone) * 1e3:.0f} | {more * 1e3:.1f} "
        f"| {median(wall):.3f} | {bounds} | {median(cpu):.3f} |"
    )


def _start_ranks(workdir: Path, rounds: int, minutes: float) -> list[dict[str, list[list[float]]]]:
    outs = [workdir / f"rank-{rank}.json" for rank in range(RANKS)]
    common = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    common.setdefault("MASTER_PORT", "29571")
    command = [sys.executable, "-m", "benchmarks.lab.reduce_schedules", "--rounds", str(rounds)]
    command += ["--minutes", str(minutes)]
    running = [
        subprocess.Popen([*command, "--workdir", workdir, "--rank-out", out], env={**common, "RANK": str(rank)})
        for rank, out in enumerate(outs)
    ]
    try:
        assert all(process.wait() == 0 for process in running), "a rank failed"
    finally:
        for process in running:
            process.kill()
    return [json.loads(out.read_text()) for out in outs]


if __name__ == "__main__":
    main()
