"""Which ranks may hold a mixture's experts together: what of it layouts are listed with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import gcd

import numpy as np

from plait.layout import Layout, conflict_sentence
from plait.planner.problem.candidates import SHARDED_STATES
from plait.planner.problem.workload import Workload


def experts_and_ranks(w: Workload, degrees: Layout) -> int:
    """The number whose divisors `expert` may be: what divides the experts and the ranks that may share them out. In
    `degrees`, `replicate` stands for all data-parallel ranks, sharded or not."""
    if not w.experts:
        return 1
    ranks = degrees.replicate * degrees.context
    return gcd(w.experts, ranks if w.expert_ranks == "copies" else ranks * degrees.tensor)


def shares_out_experts(w: Workload, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Mask of layouts whose ranks can share out experts so: where plait runs it, by the list of what excludes what."""
    if not w.experts or w.expert_ranks == "any":
        return np.ones(len(columns["expert"]), dtype=bool)
    names = ("replicate", "shard", "shard_what", "context", "expert")
    kinds, place = np.unique(np.stack([columns[name] for name in names]), axis=1, return_inverse=True)
    possible = [_may_share_out(*(int(value) for value in kind)) for kind in kinds.T]
    return np.array(possible, dtype=bool)[place.ravel()]


@cache
def _may_share_out(replicate: int, shard: int, shard_what: int, context: int, expert: int) -> bool:
    what = "parameters" if SHARDED_STATES[shard_what] == "parameters" else "optimizer"
    layout = Layout(replicate=replicate, shard=shard, shard_what=what, context=context, expert=expert)
    return expert == 1 or (replicate * shard * context % expert == 0 and conflict_sentence(layout) is None)
