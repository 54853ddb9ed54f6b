"""Which host each rank of a probe is on, as the ranks themselves say."""

from __future__ import annotations

import json
import socket
from typing import Any

from plait.checked_json import parse_json
from plait.errors import RunFailed
from plait.launch.values.job import RankContext

_LONGEST_HOST_NAME = 255


def exchange_rank_places(store: Any, context: RankContext, *, within_s: float) -> list[tuple[str, int]]:
    """(host name, local rank) of every rank, over torch.distributed's `store`; blocks until all are here.

    Raises RunFailed for a rank that does not come, or that says anything else.
    """
    store.set(f"probe/here/{context.rank}", json.dumps([socket.gethostname(), context.local_rank]))
    places = []
    for rank in range(context.world_size):
        try:
            places.append(_place(store.get(f"probe/here/{rank}"), rank))
        except RuntimeError as error:
            raise RunFailed(f"worker {rank} did not come within {within_s:.0f} s; look what its host says") from error
    return places


def _place(data: bytes, rank: int) -> tuple[str, int]:
    try:
        host, local_rank = parse_json(data)
        if not isinstance(host, str) or type(local_rank) is not int:
            raise TypeError
        if not host.isprintable() or len(host) > _LONGEST_HOST_NAME:
            raise ValueError
    except (ValueError, TypeError):
        raise RunFailed(f"worker {rank} does not say which host it is on; install the same commit on all") from None
    return host, local_rank
