"""What ranks on TPU chips must agree on before they use their chips: their addresses, and the topology of the slice."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping, Sequence

from torch._C._distributed_c10d import Store

from plait.errors import PlaitError
from plait.machines.tpus import TOPOLOGIES

ADDRESSES, TOPOLOGY = "TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY"
"""The variables that describe the slice to torch_tpu's collectives: one HOST:PORT per rank, in order, and the number of
chips along each axis of the slice."""


def join_slice(
    store: Store,
    rank: int,
    world_size: int,
    local_world_size: int,
    generation: str,
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Set this rank's variables, except those that the user or the cloud has set. Every rank must call it; blocks until
    all have."""
    if world_size == 1:
        compute_alone(environment)
        return
    if ADDRESSES not in environment:
        environment[ADDRESSES] = ",".join(_addresses(store, rank, world_size, environment))
    if TOPOLOGY not in environment:
        environment[TOPOLOGY] = topology(world_size, local_world_size, generation)

    host, _, port = environment[ADDRESSES].partition(",")[0].rpartition(":")
    environment.setdefault("MASTER_ADDR", host)
    environment.setdefault("MASTER_PORT", port)


def compute_alone(environment: MutableMapping[str, str] = os.environ) -> None:
    """Hide this process's rank from torch_tpu, which would otherwise take the process for part of a slice, and stop."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)


def topology(world_size: int, local_world_size: int, generation: str) -> str:
    """The topology of one machine's chips; raises PlaitError if it is unknown."""
    shapes = TOPOLOGIES.get(generation, {})
    if world_size == local_world_size and world_size in shapes:
        return shapes[world_size]
    if world_size == local_world_size:
        counts = " or ".join(map(str, shapes)) or "1"
        raise PlaitError(
            f"{world_size} workers do not form a rectangle of {generation or 'TPU'} chips; write run.workers = {counts}"
        )
    raise PlaitError(
        f"the run has {world_size} chips on several machines, and their topology in the slice is unknown; set "
        f'{TOPOLOGY} to the slice\'s shape on every machine, such as "4,4,1" for a v5e-16'
    )


def _addresses(store: Store, rank: int, world_size: int, environment: MutableMapping[str, str]) -> Sequence[str]:
    """HOST:PORT of every rank, exchanged through the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    host = "localhost" if environment.get("LOCAL_WORLD_SIZE") == str(world_size) else socket.gethostname()
    store.set(f"chip/{rank}", f"{host}:{port}")
    return [store.get(f"chip/{one}").decode() for one in range(world_size)]
