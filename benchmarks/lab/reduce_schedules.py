"""When and in what buckets two one-thread ranks should sum their gradients: `python -m benchmarks.lab.reduce_schedules`.

One pair of ranks takes the schedules in turn, step by step, on the same model; a step of every schedule makes a round,
and all ratios are taken within rounds, over the step that sums nothing.
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
from benchmarks.pairing import compare
from benchmarks.peers.ddp_loop import GPT2, Windows, build_optimizer
from benchmarks.workload import FIRST_RUN, prepare

MIB = 2**20
RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How gradients are summed: nothing, or buckets of a size, while the backward pass runs or once it has ended."""

    when: Literal["never", "during", "after", "shared memory"]
    bucket_mib: int = 64

    def __str__(self) -> str:
        return self.when if self.when in ("never", "shared memory") else f"{self.when}, {self.bucket_mib} MiB"


SCHEDULES = [
    Schedule(when="never"),
    *(Schedule(when="during", bucket_mib=size) for size in (1, 2, 5, 10, 25)),
    *(Schedule(when="after", bucket_mib=size) for size in (1, 5, 25, 64)),
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


def step_with(
    schedule: Schedule, gradients: FlatGradients, backward: Callable[[], None], tick: torch.Tensor
) -> tuple[float, float]:
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
        _sum_in_shared_memory(gradients, tick)
    for work in works:
        work.wait()
    for handle in handles:
        handle.remove()
    return time.perf_counter() - wall, time.process_time() - cpu


def _hook(
    gradients: FlatGradients, mebibytes: int, works: list[dist.Work]
) -> list[torch.utils.hooks.RemovableHandle]:
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


def _sum_in_shared_memory(gradients: FlatGradients, tick: torch.Tensor) -> None:
    middle = gradients.flat.numel() // 2
    halves = (slice(0, middle), slice(middle, None))
    mine, other = halves[dist.get_rank()], halves[1 - dist.get_rank()]
    dist.all_reduce(tick)  # the peer's gradients are complete
    gradients.flat[mine] += gradients.peer[mine]
    dist.all_reduce(tick)  # the peer has summed its half
    gradients.flat[other] = gradients.peer[other]
    dist.all_reduce(tick)  # the peer has read its copy of this half; it may be overwritten


def rank_main(workdir: Path, out: Path, rounds: int) -> None:
    """One rank: warm up with two rounds, then time `rounds`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    orders = Orders(
        workdir=workdir, out=out, warmup=0, steps=1, threads=1, rank=dist.get_rank(), world_size=RANKS
    )
    model = GPT2(FIRST_RUN)
    model.load_state_dict(load_file(workdir / "init.safetensors"))
    gradients = FlatGradients(list(model.parameters()), workdir)
    optimizer = build_optimizer(model, FIRST_RUN)
    windows = Windows(workdir, FIRST_RUN, orders)
    tick = torch.zeros(1)
    times: dict[str, list[tuple[float, float]]] = {str(schedule): [] for schedule in SCHEDULES}
    for number in range(rounds + 2):
        first = number % len(SCHEDULES)
        for schedule in [*SCHEDULES[first:], *SCHEDULES[:first]]:
            dist.all_reduce(tick)
            times[str(schedule)].append(step_with(schedule, gradients, lambda: model(*windows(0)).backward(), tick))
            optimizer.step()
    out.write_text(json.dumps({name: each[2:] for name, each in times.items()}))
    leave()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank-out", type=Path)
    parser.add_argument("--workdir", type=Path)
    flags = parser.parse_args()
    if flags.rank_out:
        rank_main(flags.workdir, flags.rank_out, flags.rounds)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        prepare(FIRST_RUN, Path(folder), steps=1, world_size=RANKS)
        answers = _start_ranks(Path(folder), flags.rounds)
    names = list(answers[0])
    for place, what in ((0, "wall"), (1, "CPU")):
        seconds = {name: [max(pair[place] for pair in both) for both in _by_round(answers, name)] for name in names}
        print(f"\n| schedule | ms {what} | ÷ never, median | least … greatest |\n| --- | --- | --- | --- |")
        for one in compare(seconds, "never"):
            bounds = f"{one.least_ratio:.3f} … {one.greatest_ratio:.3f}"
            print(f"| {one.name} | {one.median_s * 1e3:.1f} | {one.ratio:.3f} | {bounds} |")
        least = min(median(values) for name, values in seconds.items() if name != "never")
        print(f"\nleast median: {least * 1e3:.1f} ms")


def _by_round(answers: list[dict[str, list[tuple[float, float]]]], name: str) -> list[tuple[tuple[float, float], ...]]:
    return list(zip(*(answer[name] for answer in answers), strict=True))


def _start_ranks(workdir: Path, rounds: int) -> list[dict[str, list[tuple[float, float]]]]:
    outs = [workdir / f"rank-{rank}.json" for rank in range(RANKS)]
    common = {**os.environ, "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    common.setdefault("MASTER_PORT", "29571")
    command = [sys.executable, "-m", "benchmarks.lab.reduce_schedules", "--rounds", str(rounds)]
    running = [
        subprocess.Popen([*command, "--workdir", workdir, "--rank-out", out], env={**common, "RANK": str(rank)})
        for rank, out in enumerate(outs)
    ]
    for process in running:
        assert process.wait() == 0, "a rank failed"
    return [json.loads(out.read_text()) for out in outs]


if __name__ == "__main__":
    main()
