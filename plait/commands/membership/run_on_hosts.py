"""A run that machines are found for, and on which terms hosts may come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plait.commands.planning.run_folder import RunFolder
from plait.launch.remote.membership import JoinPolicy
from plait.launch.values.entries import EntryTable
from plait.machines.requested_workers import PeakNeed
from plait.planner.plan import Plan
from plait.planner.resolve.named import named_degrees
from plait.recipe.schema import RunConfig
from plait.screen.screen import Screen
from plait.units import counted
from plait.workers import ENTRIES, HostWorkers
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

PlanFor = Callable[[HostWorkers], Plan]
"""Makes a begun run's plan for the workers that are there; raises PlaitError where they cannot carry the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOnHosts:
    """The recipe and folder of a run, and the screen that its command prints on."""

    config: RunConfig
    folder: RunFolder
    screen: Screen
    working: WorkingFolder = CURRENT_FOLDER
    peak: PeakNeed = "measured"
    """What is asked of machines at once; a run that goes on by its plan measures them only where that must change."""

    entries: EntryTable = ENTRIES
    """What the ranks of this machine run."""

    @property
    def joining(self) -> JoinPolicy:
        """Whether hosts may come and go while the run goes on."""
        return "open" if self.config.recover.mode == "auto" else "closed"

    @property
    def secret_file(self) -> Path:
        """Where a secret that was shown on a terminal lives as long as the run."""
        return self.folder.path / ".secret"

    def why_full(self, others: int) -> str | None:
        """Why a further host is of no use beside host 0 and this many others, where that is known of any host."""
        named = named_degrees(self.config)
        if named is None or named.world_size > 1 + others:
            return None
        needed = counted(named.world_size, "worker")
        return (
            f"the recipe's layout needs {needed}, and the run has {1 + others} hosts; leave this one out, or leave the "
            "degrees out of [layout], so that the planner can use it"
        )
