"""Whether the disk of a run holds the checkpoints that it will keep: asked before its first step."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from math import inf, prod
from pathlib import Path

from plait.checkpoint.store import published_checkpoints
from plait.model.shape import weight_sizes
from plait.model.weights import trained_weights
from plait.planner.plan import Plan
from plait.run_folder import RunFolder
from plait.units import counted, format_bytes


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of a checkpoint's numbers: the weights that learn, and their moments, in float32."""
    sizes = weight_sizes(plan.job.shape)
    return 4 * (1 + plan.job.optimizer.moments) * sum(prod(sizes[name]) for name in trained_weights(plan.job.shape))


def free_bytes(folder: Path) -> float:
    """Bytes that this user may still write on the disk of a folder; infinite where it does not say."""
    with suppress(OSError):
        disk = os.statvfs(folder)
        return disk.f_bavail * disk.f_frsize
    return inf


def space_warning(folder: RunFolder, plan: Plan, free: Callable[[Path], float] = free_bytes) -> str:
    """A warning where the disk does not hold the checkpoints that stay, and one more that is written; else ""."""
    each, there = checkpoint_bytes(plan), len(published_checkpoints(folder.checkpoints))
    most = plan.cadence.checkpoint_keep + 1
    needed = each * max(1, most - there)
    if (left := free(folder.path)) >= needed:
        return ""
    return (
        f"warning  {counted(most, 'checkpoint')} of {format_bytes(each)} (checkpoint.keep, and one that is written) "
        f"need {format_bytes(needed)} more in {folder.path}, where {format_bytes(left)} are free: free some space, "
        "else saving fails"
    )
