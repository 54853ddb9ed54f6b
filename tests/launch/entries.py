"""What the ranks of these tests do. Each entry tells its pid first, so that a test can find its process."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from plait.errors import PlaitError, RunFailed
from plait.launch.values.job import RankContext

if TYPE_CHECKING:
    from torch.distributed import Store


def hello(context: RankContext, argument: str) -> None:
    _introduce(context)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    more = ("OMP_DYNAMIC", "MKL_DYNAMIC", "GLOO_SOCKET_IFNAME", "PYTHONPATH")
    context.send("hello", argument=argument, environment={name: os.environ.get(name) for name in names + more})


def tell_paths(context: RankContext, argument: str) -> None:
    """Tell where modules are looked for, and whether the one named `argument` can be imported."""
    context.send("paths", paths=sys.path, found=find_spec(argument) is not None)


def come_and_go(context: RankContext, argument: str) -> None:
    """Make and drop as many bytes again and again, and tell how many pages the system had to find from then on."""
    _introduce(context)
    found = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [bytearray(4 << 20) for _ in range(int(argument) // (4 << 20))]
        del kept
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    context.send("pages", later=max(found[2:]))


def talk(context: RankContext, argument: str) -> None:
    for number in range(int(argument)):
        context.send("number", number=number, text="x" * 300)


def talk_too_much(context: RankContext, argument: str) -> None:
    context.send("text", text="x" * (1 << 20))


def print_some(context: RankContext, argument: str) -> None:
    print(f"rank {context.rank} prints {argument}")


def fail_on_one(context: RankContext, argument: str) -> None:
    _introduce(context)
    if context.rank == 1:
        raise ValueError(argument)
    _wait_for_ever()


def raise_plait_error(context: RankContext, argument: str) -> None:
    if context.rank == 1:
        raise {"PlaitError": PlaitError, "RunFailed": RunFailed}[argument]("the file is empty; give one with text")
    _wait_for_ever()


def lose_a_peer(context: RankContext, argument: str) -> None:
    """Rank 0 sees a connection break, in gloo's words, as soon as the file `argument` is there."""
    _introduce(context)
    while context.rank != 0 or not Path(argument).exists():
        _tick()
    raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1")


def leave_on_one(context: RankContext, argument: str) -> None:
    if context.rank == 1:
        os._exit(int(argument))
    _wait_for_ever()


def wait_for_stop(context: RankContext, argument: str) -> None:
    _introduce(context)
    while not context.stop_requested():
        _tick()
    context.send("saved", rank=context.rank)


def save_on_word(context: RankContext, argument: str) -> None:
    """Tell of the stop when it is asked for, and save when the file `argument` is there."""
    _introduce(context)
    while not context.stop_requested():
        _tick()
    context.send("asked")
    while not Path(argument).exists():
        _tick()
    context.send("saved", rank=context.rank)


def be_deaf(context: RankContext, argument: str) -> None:
    _introduce(context)
    _wait_for_ever()


def leave_a_child(context: RankContext, argument: str) -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    context.send("pid", pid=child.pid, server=os.getppid())


def all_reduce(context: RankContext, argument: str) -> None:
    import torch
    import torch.distributed as dist

    _join(context)
    value = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(value)
    context.send("sum", value=value.item())
    dist.destroy_process_group()


def hosts_reduce(context: RankContext, argument: str) -> None:
    """Meet through plait's own store, wherever the ranks are, and sum their numbers."""
    import torch
    import torch.distributed as dist

    _meet(context)
    value = torch.tensor([float(context.rank + 1)])
    dist.all_reduce(value)
    local = [context.local_rank, context.local_world_size]
    context.send("sum", value=value.item(), argument=argument, local=local, interface=os.environ["GLOO_SOCKET_IFNAME"])
    dist.destroy_process_group()


def meet_and_wait(context: RankContext, argument: str) -> None:
    import torch
    import torch.distributed as dist

    _meet(context)
    dist.all_reduce(torch.ones(1))
    wait_for_stop(context, argument)


def meet_strangers(context: RankContext, argument: str) -> None:
    """Tell where the store is, and wait in it until somebody has set the key "seen"."""
    from plait.parallel.mesh import open_store

    store = open_store(context.rendezvous, context.rank, context.world_size)
    if context.rank == 0:
        context.send("store", rendezvous=context.rendezvous)
    store.wait(["seen"], timedelta(seconds=60))


def reduce_until_one_fails(context: RankContext, argument: str) -> None:
    """Rank 1 raises or waits to be killed between two collectives; its peers only see the connection break."""
    import torch
    import torch.distributed as dist

    (_meet if "on hosts" in argument else _join)(context)
    dist.all_reduce(torch.ones(1))
    _introduce(context)
    if context.rank == 1 and argument.startswith("raise"):
        raise ValueError("the root cause")
    if context.rank == 1:
        _wait_for_ever()
    while True:
        dist.all_reduce(torch.ones(1))


def count_threads(context: RankContext, argument: str) -> None:
    import torch

    # No product of matrices: for those MKL takes no more threads than cores on some processors.
    numbers = torch.randn(3000, 3000, requires_grad=True)
    for _ in range(10):
        numbers.exp().sum().backward()
    context.send("threads", claimed=torch.get_num_threads(), worked=_threads_that_worked(0.02))


def _threads_that_worked(at_least_s: float) -> int:
    """How many threads of this process had so much processor time; torch also keeps some that only wait."""
    tasks = Path("/proc/self/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) > at_least_s * 1e9 for task in tasks)


def _join(context: RankContext) -> None:
    import torch.distributed as dist

    _form_group(context, dist.FileStore(context.rendezvous, context.world_size))


def _meet(context: RankContext) -> None:
    from plait.parallel.mesh import open_store

    _form_group(context, open_store(context.rendezvous, context.rank, context.world_size))


def _form_group(context: RankContext, store: Store) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=store, rank=context.rank, world_size=context.world_size, timeout=timedelta(seconds=60)
    )


def _introduce(context: RankContext) -> None:
    context.send("pid", pid=os.getpid(), server=os.getppid())


def _wait_for_ever() -> None:
    while True:
        signal.pause()


def _tick() -> None:
    threading.Event().wait(0.01)


def make_copies(context: RankContext, argument: str) -> None:
    """Make whole copies of steps 5 and 6, and another one of step 7 on rank 0 alone."""
    assert context.memory is not None
    for slot, step in enumerate((5, 6, 7) if context.rank == 0 else (5, 6)):
        context.memory.begin(slot)
        context.memory.finish(slot, step=step, lineage=int(argument), text=b"", data_bytes=0)
