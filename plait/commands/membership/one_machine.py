"""The workers of a run on one machine, whose GPUs or processor cores may be lost for good."""

from __future__ import annotations

from collections.abc import Callable

from plait.commands.membership.run_on_hosts import PlanFor
from plait.commands.monitoring.elastic_workers import CannotGoOn, Renewed
from plait.errors import PlaitError
from plait.launch.values.failed_job import FailureFacts
from plait.machines.machine import Machine, usable_cores
from plait.planner.plan import Plan
from plait.units import counted
from plait.workers import HostWorkers

_NOT_OF_A_DEVICE = ("SIGKILL", "SIGTERM", "SIGINT")
"""What kills a worker and says nothing of its GPU."""
Survey = Callable[[], Machine]
"""Looks at this machine with the devices that the recipe asks for; raises PlaitError where they cannot be used."""


class OneMachine:
    """ElasticWorkers of this machine alone. `plan_for` makes each further plan."""

    def __init__(self, workers: HostWorkers, survey: Survey, plan_for: PlanFor) -> None:
        self.workers = workers
        self._survey, self._plan_for = survey, plan_for

    @property
    def may_shrink(self) -> bool:
        return False

    def renewed(self, plan: Plan, failure: FailureFacts | None) -> Renewed | None:
        """As in ElasticWorkers: processors' cores tell what is gone, or torch after a failure that may be a GPU's."""
        gone = self._gone(plan, failure)
        if not gone:
            return None
        try:
            return Renewed(plan=self._plan_for(self.workers), subject="devices", who=f"{gone} are gone")
        except PlaitError as error:
            raise CannotGoOn(
                f"{gone} of this machine are gone, and what is left cannot carry the run: {error}; or bring them back: "
                "the run is saved, and the same command goes on with it",
                None,
            ) from error

    def _gone(self, plan: Plan, failure: FailureFacts | None) -> str:
        """What this machine had when the plan was made, and has no more; empty where all is there."""
        if self.workers.fixed_workers is not None:  # torchrun's: nobody here could start others
            return ""
        if plan.machines.device == "cpu":
            return _lost_text(plan.machines.fingerprint["cores"], usable_cores(), "core")
        if failure is None or failure.what in _NOT_OF_A_DEVICE:  # looking at GPUs takes seconds
            return ""
        return _lost_text(plan.machines.fingerprint["devices"], self._survey().devices, "GPU")


def _lost_text(before: int, now: int, what: str) -> str:
    return f"{before - now} of {counted(before, what)}" if now < before else ""
