"""The tracking tools that a run can report to, and the interface that each implements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from plait.errors import PlaitError, installing
from plait.report.samples_file import SampleReport

Settings = Mapping[str, float | str | bool]
MetricRow = tuple[int, Mapping[str, float]]
"""A step and its metrics."""


EndState = Literal["finished", "stopped"]


class Tracker(Protocol):
    """One run in one tool. Rows come in the order of steps, each step once; every method may raise whatever the tool
    raises."""

    run_id: str
    """The id by which the tool finds the run again when it is resumed."""
    address: str
    """Where a person finds the run, in words."""
    last_step: int
    """The last step that the tool has, as far as it knows; 0 for a new run."""

    def log(self, rows: Sequence[MetricRow]) -> None: ...

    def sample(self, report: SampleReport) -> None: ...

    def finish(self, state: EndState) -> None:
        """Send what is left and close the run; a stopped run may be resumed later."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The facts of a run that a tool receives."""

    folder: Path
    name: str
    project: str
    """The name of the folder that contains runs/: tools compare the runs of one project."""
    settings: Settings


OpenTracker = Callable[[TrackedRun, str], Tracker]
"""Opens a run in a tool: a new run for an empty id, else the run with this id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingTool:
    """A tracking tool that a recipe can name."""

    title: str
    package: str
    opener: str
    """module:function, an OpenTracker."""

    def open(self) -> OpenTracker:
        """The function that opens runs in it; imports the tool."""
        module, _, function = self.opener.partition(":")
        found: OpenTracker = getattr(import_module(module), function)
        return found


TRACKING_TOOLS: Mapping[str, TrackingTool] = {
    "wandb": TrackingTool(title="W&B", package="wandb", opener="plait.tracking.wandb_tracker:open_wandb"),
    "mlflow": TrackingTool(title="MLflow", package="mlflow", opener="plait.tracking.mlflow_tracker:open_mlflow"),
    "trackio": TrackingTool(title="Trackio", package="trackio", opener="plait.tracking.trackio_tracker:open_trackio"),
}


def tracking_tools_of(to: Collection[str]) -> Sequence[str]:
    """The tracking tools among a recipe's destinations."""
    return [name for name in to if name in TRACKING_TOOLS]


def refuse_missing_tools(to: Collection[str]) -> None:
    """Raise PlaitError if a recipe names a tool that is not installed."""
    for name in tracking_tools_of(to):
        found = find_spec(TRACKING_TOOLS[name].package)
        if found is None or found.origin is None:  # a mere folder of that name, such as W&B's
            raise PlaitError(
                f'report.to names "{name}", and {TRACKING_TOOLS[name].title} is not installed',
                f"install it: {installing(f'plait[{name}]')}; or take it out of report.to",
            )
