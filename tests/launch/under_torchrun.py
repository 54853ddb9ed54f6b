"""What torchrun starts in its test: join the group, say the pid, wait for a signal, say who was there."""

from __future__ import annotations

import json
import os
import threading

import torch
import torch.distributed as dist

from plait.launch.local.torchrun import torchrun_context
from plait.launch.values.job import Message


def main() -> None:
    context = torchrun_context(_print)
    assert context is not None
    dist.init_process_group("gloo", init_method=context.rendezvous)
    pids = torch.zeros(context.world_size, dtype=torch.int64)
    pids[context.rank] = os.getpid()
    dist.all_reduce(pids)
    context.send("pids", pids=pids.tolist(), threads=context.threads, local_world_size=context.local_world_size)
    while not context.stop_requested():
        threading.Event().wait(0.01)
    dist.barrier()
    context.send("saved")


def _print(message: Message) -> None:
    print(json.dumps({"kind": message.kind, "rank": message.rank, **message.values}), flush=True)


if __name__ == "__main__":
    main()
