"""The workers of a person's program: this process's place among them, and how it finds the others."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from plait.custom.leaving import wait_for_gloo_threads
from plait.custom.variables import RENDEZVOUS
from plait.errors import PlaitError

if TYPE_CHECKING:
    from plait.parallel.mesh import Sums

PEER_WAIT = timedelta(minutes=30)
"""How long a worker waits for another one: a person's own evaluation or saving may take its time."""


SharedCall = Literal["run.step", "run.evaluate", "run.save", "run.resume", "run.verify", "run.plan"]
"""What all workers must call together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """All workers of a program and this one's place among them; `rank` is global, `local_rank` counts on this host."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    sums: Sums
    """Sums over all workers, for tensors of processors and of the workers' devices."""
    connections: dist.ProcessGroup | None = None
    """Those of `sums`, where no gradients stand in line; None: those of all."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Give every worker the values that `source` has, in place. Every worker must call it; blocks."""
        if self.size > 1:
            dist.broadcast(tensor, src=source)
        return tensor

    def announce(self, call: SharedCall, number: int = 0) -> Callable[[], None]:
        """Begin to tell all workers in which call this one is, and at which number of it.

        What is returned waits for all of them, and raises PlaitError where another one is in another call or at another
        number: those would wait for each other's messages for ever. Every worker must call both.
        """
        if self.size == 1:
            return _nothing_to_compare
        code = get_args(SharedCall).index(call)
        told = torch.tensor([code, code**2, number, number**2], dtype=torch.float64)
        work = dist.all_reduce(told, group=self.connections, async_op=True)
        assert work is not None

        def compare() -> None:
            work.wait()
            codes, squares, numbers, number_squares = told.tolist()
            if (codes, squares) != (code * self.size, code**2 * self.size):
                other = _other_call(code, codes, squares, self.size)
                raise PlaitError(
                    f"worker {self.rank} calls {call} while another one calls {other}; every worker must call both, "
                    "so neither may stand under `if run.rank == 0`"
                )
            if (numbers, number_squares) != (number * self.size, number**2 * self.size):
                raise PlaitError(
                    f"worker {self.rank} takes a step with batch {number} of its loop, and the workers' mean is "
                    f"{numbers / self.size:g}: one of them skipped a step; every worker must call run.step for every "
                    "batch"
                )

        return compare

    def say(self, line: str) -> None:
        """Print a fact once, by the first worker."""
        if self.rank == 0:
            print(f"plait: {line}", flush=True)


def _other_call(code: int, codes: float, squares: float, size: int) -> str:
    """The call of the others, where all of them but this worker, or one of them alone, are in the same one."""
    for count in (1, size - 1):
        other, rest = (codes - code * (size - count)) / count, (squares - code**2 * (size - count)) / count
        if rest == other**2:
            return get_args(SharedCall)[int(other)]
    return "something else"


def _nothing_to_compare() -> None:
    """One worker agrees with itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedWorker:
    """What the environment says of a worker that somebody started among others."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    rendezvous: str
    """As in `parallel.mesh.open_store`."""


def find_workers() -> Workers:
    """Join the group that this process was started for: by plait, torchrun or srun; alone where there is none.

    Blocks until all workers are here. A process that has a group of torch.distributed already keeps it.
    """
    if dist.is_available() and dist.is_initialized():
        return _workers_of_group(_number(os.environ, "LOCAL_RANK", default=dist.get_rank()))
    started = started_worker(os.environ)
    if started is None or started.size == 1:
        return alone()
    device = _device_of(started)
    from plait.parallel.mesh import open_store

    if started.rendezvous.startswith("srun://"):
        host, port = started.rendezvous.removeprefix("srun://").rsplit(":", 1)
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    rendezvous = "env://program" if started.rendezvous.startswith("srun://") else started.rendezvous
    store = open_store(rendezvous, started.rank, started.size)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=started.rank, world_size=started.size, timeout=PEER_WAIT)
    atexit.register(wait_for_gloo_threads)
    return _workers_of_group(started.local_rank)


def alone() -> Workers:
    """One process, without any group."""
    from plait.custom.lone_sums import LONE_SUMS

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return Workers(rank=0, size=1, local_rank=0, device=device, sums=LONE_SUMS)


def started_worker(environment: Mapping[str, str]) -> StartedWorker | None:
    """What the environment says; None for a process that nobody started among others. Raises PlaitError for what is no
    number or no host."""
    if RENDEZVOUS in environment:
        return _by_names(environment, environment[RENDEZVOUS])
    if all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return _by_names(environment, "env://program")
    if _number(environment, "SLURM_NTASKS", default=1) > 1 and "SLURM_PROCID" in environment:
        return _by_slurm(environment)
    return None


def _by_names(environment: Mapping[str, str], rendezvous: str) -> StartedWorker:
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    return StartedWorker(
        rank=rank,
        size=size,
        local_rank=_number(environment, "LOCAL_RANK", default=rank),
        local_size=_number(environment, "LOCAL_WORLD_SIZE", default=size),
        rendezvous=rendezvous,
    )


def _by_slurm(environment: Mapping[str, str]) -> StartedWorker:
    """srun's tasks meet at the first host of the step, at a port that follows from the job's number."""
    size = _number(environment, "SLURM_NTASKS")
    host = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", ""))
    job = _number(environment, "SLURM_JOB_ID", default=0)
    port = environment.get("MASTER_PORT") or str(20_000 + job % 20_000)
    nodes = max(1, _number(environment, "SLURM_STEP_NUM_NODES", default=1))
    return StartedWorker(
        rank=_number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_size=-(-size // nodes),
        rendezvous=f"srun://{host}:{port}",
    )


def first_host(nodes: str) -> str:
    """The first host of one of Slurm's lists: "gpu[03-05,9],cpu1" -> "gpu03"."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if match is None:
        raise PlaitError("srun started this process without SLURM_STEP_NODELIST; set MASTER_ADDR to the first host")
    return match[1] + (match[2] or "")


def _workers_of_group(local_rank: int) -> Workers:
    from plait.parallel.mesh import GroupSums, world_sums

    check_backends(str(dist.get_backend_config()))
    rank, size = dist.get_rank(), dist.get_world_size()
    cuda = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    sums = world_sums()
    connections = sums.group if isinstance(sums, GroupSums) else None
    return Workers(rank=rank, size=size, local_rank=local_rank, device=device, sums=sums, connections=connections)


def check_backends(config: str) -> None:
    """Raise PlaitError where a group that the program itself has opened ("cuda:nccl") carries no numbers of
    processors."""
    if not any(one.partition(":")[0] == "cpu" for one in config.split(",")):
        raise PlaitError(
            f'the program has opened torch.distributed for "{config}" alone; leave init_process_group out, as '
            'plait.spread opens it, or open it with backend="cpu:gloo,cuda:nccl"'
        )


def _device_of(started: StartedWorker) -> torch.device:
    """This worker's own GPU, or the processor where the machine has none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if started.local_size > count:
        raise PlaitError(
            f"{started.local_size} workers on a machine with {count} GPU{'s' * (count > 1)}; start {count}, or "
            f"hide the "
            "GPUs (CUDA_VISIBLE_DEVICES=) to use processors"
        )
    torch.cuda.set_device(started.local_rank)
    return torch.device("cuda", started.local_rank)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise PlaitError(f"{name} = {text!r} in the environment is not a number; unset it, or start by plait run")
    return int(text)
