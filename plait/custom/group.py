"""The workers of a person's program: this process's place among them, and how it finds the others."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.distributed as dist

from plait.accelerator import accelerator_name, own_device
from plait.custom.message_order import MessageOrder
from plait.custom.process.launcher import LAUNCHER, Launcher
from plait.custom.process.leaving import wait_for_gloo_threads
from plait.custom.process.started_worker import StartedWorker, environment_number, gpu_or_processor, started_worker
from plait.devices import DEVICE_TRAITS, traits_of
from plait.errors import PlaitError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from plait.parallel.communicator import Communicator

PEER_WAIT = timedelta(minutes=30)
"""How long a worker waits for another one: a person's own evaluation or saving may take its time."""


SharedCall = Literal[
    "run.batches", "run.step", "run.evaluate", "run.save", "run.resume", "run.verify", "run.plan", "run.timeline",
    "run.record_steps",
]  # fmt: skip
"""Operations that all workers must call together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """All workers of a program and this one's place among them; `rank` is global, `local_rank` counts on this host."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    sums: Communicator
    """Sums over all workers, for tensors of processors and of the workers' devices."""
    connections: dist.ProcessGroup | None = None
    """Those of `sums`, where no gradients stand in line; None: those of all."""
    launcher: Launcher = field(default_factory=LAUNCHER.get)
    order: MessageOrder = field(default_factory=MessageOrder)
    """The order of the messages for which forward and backward passes wait."""

    def announce(self, call: SharedCall, number: int = 0) -> Callable[[], None]:
        """Begin to tell all workers in which call this one is, and at which number of it.

        What is returned waits for all of them, and raises PlaitError where another one is in another call or at another
        number: those would wait for each other's messages for ever. Every worker must call both.
        """
        self.launcher.note_call(call)
        if self.size == 1:
            return _nothing_to_compare
        self.order.end()
        code = get_args(SharedCall).index(call)
        header = torch.tensor([code, code**2, number, number**2], dtype=torch.float64)
        work = dist.all_reduce(header, group=self.connections, async_op=True)
        assert work is not None

        def compare() -> None:
            work.wait()
            codes, squares, numbers, number_squares = header.tolist()
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


def find_workers() -> Workers:
    """Join the group that this process was started for: by plait, torchrun or srun; alone where there is none.

    Blocks until all workers are here. A process that has a group of torch.distributed already keeps it.
    """
    if dist.is_available() and dist.is_initialized():
        return _workers_of_group(environment_number(os.environ, "LOCAL_RANK", default=dist.get_rank()))
    started = started_worker(os.environ)
    if started is None or started.size == 1:
        return alone()
    device = gpu_or_processor(started)
    from plait.parallel.mesh import open_store

    if started.rendezvous.startswith("srun://"):
        host, port = started.rendezvous.removeprefix("srun://").rsplit(":", 1)
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    rendezvous = "env://program" if started.rendezvous.startswith("srun://") else started.rendezvous
    store = open_store(rendezvous, started.rank, started.size)
    check_same_devices(store, started, device)
    backend = traits_of(device.type).process_groups
    dist.init_process_group(backend, store=store, rank=started.rank, world_size=started.size, timeout=PEER_WAIT)
    atexit.register(wait_for_gloo_threads)
    return _workers_of_group(started.local_rank)


def check_same_devices(store: Store, started: StartedWorker, device: torch.device) -> None:
    """Raise PlaitError where this worker has a GPU and the first one has none, or the other way round: their messages
    would go by different libraries, and wait for each other."""
    names = {row.name: "a GPU" if row.is_accelerator else "no GPU that torch sees" for row in DEVICE_TRAITS.values()}
    store.set_timeout(PEER_WAIT)
    store.set(f"device/{started.rank}", device.type)
    first = store.get("device/0").decode()
    if first != device.type:
        own, others = names[traits_of(device.type).name], names[traits_of(first).name]
        raise PlaitError(
            f"worker {started.rank} has {own} and worker 0 has {others}, and a program takes one kind; leave out one "
            "of the two, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to use processors"
        )


def alone() -> Workers:
    """One process, without any group."""
    from plait.parallel.communicator import ONE_PROCESS

    return Workers(rank=0, size=1, local_rank=0, device=own_device(accelerator_name()), sums=ONE_PROCESS)


def _workers_of_group(local_rank: int) -> Workers:
    from plait.parallel.mesh import GroupCommunicator, accelerator_of_group, world_communicator

    check_backends(str(dist.get_backend_config()))
    rank, size = dist.get_rank(), dist.get_world_size()
    device = (accelerator_of_group(None) if accelerator_name() else None) or torch.device("cpu")
    sums = world_communicator(PEER_WAIT)
    connections = sums.group if isinstance(sums, GroupCommunicator) else None
    return Workers(rank=rank, size=size, local_rank=local_rank, device=device, sums=sums, connections=connections)


def check_backends(config: str) -> None:
    """Raise PlaitError where a group that the program itself has opened ("cuda:nccl") carries no numbers of
    processors."""
    if not any(one.partition(":")[0] == "cpu" for one in config.split(",")):
        raise PlaitError(
            f'the program has opened torch.distributed for "{config}" alone; leave init_process_group out, as '
            'plait.spread opens it, or open it with backend="cpu:gloo,cuda:nccl"'
        )
