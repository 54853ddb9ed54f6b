"""Reads from the environment a worker started by plait, torchrun or srun: its place, its peers, its GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from plait.accelerator import accelerator_count, accelerator_name, choose_device
from plait.custom.process.launcher import RENDEZVOUS
from plait.errors import PlaitError
from plait.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedWorker:
    """The environment's facts about a worker that was started as one of several."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    rendezvous: str
    """As in `parallel.mesh.open_store`."""
    host_gpus: int = 0
    """GPUs that a scheduler gave all workers of this host together; 0 if unknown."""


def started_worker(environment: Mapping[str, str]) -> StartedWorker | None:
    """The worker that the environment describes; None for a process that was not started as one of several. Raises
    PlaitError for an invalid number or host."""
    if RENDEZVOUS in environment:
        return _by_names(environment, environment[RENDEZVOUS])
    if all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return _by_names(environment, "env://program")
    if environment_number(environment, "SLURM_NTASKS", default=1) > 1 and "SLURM_PROCID" in environment:
        return _by_slurm(environment)
    return None


def _by_names(environment: Mapping[str, str], rendezvous: str) -> StartedWorker:
    rank, size = environment_number(environment, "RANK"), environment_number(environment, "WORLD_SIZE")
    return StartedWorker(
        rank=rank,
        size=size,
        local_rank=environment_number(environment, "LOCAL_RANK", default=rank),
        local_size=environment_number(environment, "LOCAL_WORLD_SIZE", default=size),
        rendezvous=rendezvous,
    )


def _by_slurm(environment: Mapping[str, str]) -> StartedWorker:
    """srun's tasks meet at the first host of the step, at a port that follows from the job's number."""
    size = environment_number(environment, "SLURM_NTASKS")
    host = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", ""))
    job = environment_number(environment, "SLURM_JOB_ID", default=0)
    port = environment.get("MASTER_PORT") or str(20_000 + job % 20_000)
    tasks = _tasks_of_this_node(environment, size)
    of_all_tasks = tasks * environment_number(environment, "SLURM_GPUS_PER_TASK", default=0)
    return StartedWorker(
        rank=environment_number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=environment_number(environment, "SLURM_LOCALID"),
        local_size=tasks,
        rendezvous=f"srun://{host}:{port}",
        host_gpus=environment_number(environment, "SLURM_GPUS_ON_NODE", default=of_all_tasks),
    )


def _tasks_of_this_node(environment: Mapping[str, str], size: int) -> int:
    """By Slurm's list of how many tasks each node has: of "2(x3),1" the fourth node has 1."""
    counts: list[int] = []
    for text in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", text.strip()):
            counts += [int(match[1])] * int(match[2] or 1)
    node = environment_number(environment, "SLURM_NODEID", default=0)
    if node < len(counts):
        return counts[node]
    return -(-size // max(1, environment_number(environment, "SLURM_STEP_NUM_NODES", default=1)))


def first_host(nodes: str) -> str:
    """The first host of one of Slurm's lists: "gpu[03-05,9],cpu1" -> "gpu03"."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if match is None:
        raise PlaitError("srun started this process without SLURM_STEP_NODELIST; set MASTER_ADDR to the first host")
    return match[1] + (match[2] or "")


def gpu_or_processor(started: StartedWorker) -> torch.device:
    """This worker's own GPU, or the processor where the machine has none."""
    name = accelerator_name()
    if name is None:
        return torch.device("cpu")
    count, own = accelerator_count(), started.local_rank
    if started.local_size > count and started.host_gpus >= started.local_size:
        own = 0  # srun bound GPUs to each task (--gpus-per-task), which sees no others
    elif started.local_size > count:
        raise PlaitError(
            f"{started.local_size} workers on a machine with {counted(count, 'GPU')}; start {count}, or hide the GPUs "
            "(CUDA_VISIBLE_DEVICES=) to use processors"
        )
    device = torch.device(name, own)
    choose_device(device)
    return device


def environment_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A number in the environment; raises PlaitError for what is none, and where it is missing and has no default."""
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise PlaitError(f"{name} = {text!r} in the environment is not a number; unset it, or start by plait run")
    return int(text)
