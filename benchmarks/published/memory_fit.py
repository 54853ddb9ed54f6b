"""Whether a published run's devices held it: the hard limit, and the slack that a plan leaves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plait.machines.cluster import Cluster
from plait.planner.memory.estimate import MemoryEstimate


def cannot_fit(needed: MemoryEstimate, cluster: Cluster) -> NDArray[np.bool_]:
    """Mask of candidates that cannot run on the smallest device even if the allocator wastes nothing."""
    return needed.allocated > min(island.device.memory_bytes for island in cluster.islands)


def fits(needed: MemoryEstimate, cluster: Cluster) -> NDArray[np.bool_]:
    """Mask of candidates that fit the smallest device with the usual slack: what a plan may choose from."""
    return needed.reserved <= min(island.device.memory_bytes for island in cluster.islands)
