"""The ranks of a short check: every device computes, every link answers, an all-reduce adds up; and what each host has
free."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from plait.launch.values.job import RankContext
from plait.machines.detect import describe_machine
from plait.machines.machine import free_memory_bytes, usable_memory_bytes
from plait.probing.check import HostState, MachineCheck
from plait.probing.rank import ProbeRank, join_probe, require_working_devices, time_pairs

CHECKED_MESSAGE_BYTES = (2**10, 2**20, 2**24)
SUM_BYTES = 2**24
SUM_ROUNDS = 5


def run_machine_check_rank(context: RankContext, argument: str) -> None:
    """Entry of each rank of a check; the argument is JSON: the kind of "device", and "gpus" as `join_probe` takes them.

    Rank 0 sends one "checked" message, a MachineCheck. Raises RunFailed, with a sentence, for a dead device or link.
    """
    torch.set_num_threads(context.threads)
    asked = json.loads(argument)
    place = join_probe(context, asked["device"], asked["gpus"])
    pairs = time_pairs(place, CHECKED_MESSAGE_BYTES)
    require_working_devices(place)
    seconds, error = _time_sum(place, context.world_size)
    firsts = [host.ranks[0] for host in place.hosts]
    if place.rank in firsts:
        place.publish(f"state/{place.rank}", asdict(host_state(Path.cwd())))
    if context.rank == 0:
        found = MachineCheck(
            hosts=place.hosts,
            states=tuple(place.wait_for(f"state/{first}", HostState, first) for first in firsts),
            pairs=tuple(pairs),
            sum_bytes=SUM_BYTES,
            sum_s=seconds,
            sum_error=error,
        )
        context.send("checked", **asdict(found))
    place.bench.lockstep.barrier()
    dist.destroy_process_group()


def host_state(folder: Path) -> HostState:
    """This host's description and free resources; `folder` is where runs are kept."""
    machine = describe_machine()
    versions, memory = dict(machine.versions), usable_memory_bytes()
    return HostState(
        device=machine.name,
        memory_bytes=memory,
        free_memory_bytes=min(memory, free_memory_bytes()),
        free_disk_bytes=shutil.disk_usage(folder).free,
        python=versions["python"],
        torch=versions["torch"],
        plait=versions["plait"],
    )


def _time_sum(place: ProbeRank, ranks: int) -> tuple[float, float]:
    """Seconds of an all-reduce over all ranks, and how far its largest error is from 0. Every rank must call it."""
    # Rank r gives (r + 1) × (1, 2, …, 8, 1, 2, …), whole numbers that float32 adds exactly.
    pattern = torch.arange(SUM_BYTES // 4, device=place.bench.device).remainder(8).add(1).float()
    expected, times, error = pattern * (ranks * (ranks + 1) // 2), list[float](), 0.0
    for _ in range(SUM_ROUNDS):
        given = pattern * (place.rank + 1)
        place.bench.lockstep.barrier()
        began = time.perf_counter()
        dist.all_reduce(given)
        error = max(error, float((given - expected).abs().max()))  # waits for the device
        times.append(time.perf_counter() - began)
    return place.bench.lockstep.largest(median(times)), place.bench.lockstep.largest(error)
