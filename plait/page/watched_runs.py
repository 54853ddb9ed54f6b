"""The runs that a page can show: those of the working folder, and those given by their folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from plait.page.watched_run import WatchedRun, stamp_of
from plait.private_folder import RUNS
from plait.run_files.running_runs import is_at_work, registry_folder
from plait.run_files.summary import RunSummary, run_paths, summary_of
from plait.run_folder import RunFolder
from plait.working_folder import WorkingFolder

MOST_OPEN_RUNS = 32
"""Number of most recently requested runs whose curves are kept in memory."""


class WatchedRuns:
    """Answers a page's requests about runs; callable from several threads, one after the other.

    `named` are the folders of runs outside the working folder: each is known by its folder's name, which takes
    precedence over a run of the working folder.
    """

    def __init__(self, working: WorkingFolder, named: Sequence[Path] = ()) -> None:
        self._working = working
        self._named = {path.name: path for path in named}
        self._open: dict[str, WatchedRun] = {}
        self._known: dict[Path, _KnownRun] = {}
        self._lock = Lock()

    def list(self) -> Sequence[Mapping[str, Any]]:
        """A row for each run, the most recently changed first."""
        with self._lock:
            found = [summary for path in self._paths().values() if (summary := self._summary(path, "all"))]
            self._known = {one.path: self._known[one.path] for one in found}
        return [one.to_dict() for one in sorted(found, key=lambda one: (-one.updated.timestamp(), one.name))]

    def view(self, name: str, after: int = 0) -> Mapping[str, Any] | None:
        """One run, with the metrics of the steps after `after`; None if there is no such run."""
        with self._lock:
            path = self._paths().get(name)  # a name is only looked up, and never becomes part of a path
            summary = self._summary(path, "state") if path else None
            run = self._open.pop(name, None)
            if path is None or summary is None:
                if run is not None:
                    run.close()
                return None
            self._open[name] = run = run or WatchedRun(RunFolder(path))
            while len(self._open) > MOST_OPEN_RUNS:
                self._open.pop(next(iter(self._open))).close()
            return {**run.view(after), "state": summary.state, "command": summary.command}

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for run in self._open.values():
                run.close()
            self._open.clear()

    def _paths(self) -> Mapping[str, Path]:
        return {path.name: path for path in run_paths(self._working)} | self._named

    def _summary(self, path: Path, needed: Literal["all", "state"]) -> RunSummary | None:
        """A run's progress, recomputed only if a file that it depends on changed or its process ended: its state and
        command do not depend on its metrics, which change with each step."""
        folder, known = RunFolder(path), self._known.get(path)
        files = (folder.plan, folder.recipe, folder.receipt, folder.incidents, folder.starts)
        stamps = tuple(stamp_of(file) for file in files)
        metrics = stamp_of(folder.metrics)
        if known and known.stamps == stamps and (needed == "state" or known.metrics == metrics):
            at_work = known.summary.state in ("training", "starting")
            if at_work == is_at_work(path, registry_folder()):
                return known.summary
        summary = summary_of(folder, self._working if path.name not in self._named else WorkingFolder(path.parents[1]))
        if summary is not None and path.parent.name != RUNS:  # no command finds it there
            summary = replace(summary, command="")
        if summary is not None:
            self._known[path] = _KnownRun(summary=summary, stamps=stamps, metrics=metrics)
        return summary


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownRun:
    """A run's progress, and the files that it was read from."""

    summary: RunSummary
    stamps: Sequence[Any]
    metrics: Any
