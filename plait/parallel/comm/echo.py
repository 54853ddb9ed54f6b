"""Times messages from rank to rank, to find which of several links is slow."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

ECHO_BYTES = 256 * 1024
"""More than a switch's buffers let through at once, and on 100 Mbit/s still done in 20 ms."""
ECHO_ROUNDS = 3


def message_from_before_s(message_bytes: int = ECHO_BYTES, rounds: int = ECHO_ROUNDS) -> float:
    """Least seconds of a message to this rank from the previous one (to rank 0 from the last rank).

    All ranks send to the next one at the same time. Every rank of the job must call it; blocks. Takes CPU tensors, and
    so the way between hosts that gloo takes.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    if count == 1:
        return 0.0
    sent, received = (torch.zeros(message_bytes, dtype=torch.uint8) for _ in range(2))
    took_s: list[float] = []
    for _ in range(rounds):
        dist.all_reduce(torch.zeros(1))  # all begin together: a rank that is late is no slow link
        began = time.perf_counter()
        arrival = dist.irecv(received, src=(rank - 1) % count)
        departure = dist.isend(sent, dst=(rank + 1) % count)
        assert arrival is not None and departure is not None
        arrival.wait()
        took_s.append(time.perf_counter() - began)
        departure.wait()
    return min(took_s)
