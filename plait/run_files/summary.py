"""The runs of a working folder, one row each, read only from their folders: their progress, and the command that
continues each."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import isfinite, isnan
from pathlib import Path
from typing import Any, Literal, TypeVar

from plait.checkpoint.store import published_checkpoints
from plait.errors import PlaitError
from plait.model.shape import parameter_count
from plait.planner.plan import Plan
from plait.report.incidents import read_incidents, read_starts
from plait.report.metrics import EvalReport, StepReport, median_speed, read_last_metrics
from plait.report.receipt import Receipt
from plait.report.receipt_file import read_receipt
from plait.run_files.running_runs import is_at_work, registry_folder
from plait.run_folder import RunFolder
from plait.working_folder import WorkingFolder

RunState = Literal["finished", "training", "stopped", "failed"]
"""`failed` is a run that ended with a failure and was not started again since."""
ListedState = RunState | Literal["starting", "not begun", "unreadable"]
"""Includes folders without recipe and plan, in which plait is preparing text or measuring ("starting") or was ended
while doing so ("not begun"), and runs whose files cannot be read."""
LossUnit = Literal["nats per byte", "nats per token", "nats per pair"]
LossText = Literal["held out", "last step"]
_SPEED_STEPS = 50
_LINES_BETWEEN_EVALUATIONS = 1_000
_MARKS = ("recipe.toml", "plan.json", "metrics.jsonl", "receipt.json", "checkpoints", ".lock")
"""Names that mark a folder below runs/ as a run."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The progress of one run and how to continue it; None for what its files do not say."""

    name: str
    path: Path
    state: ListedState
    step: int
    """The last reported step."""
    step_saved: int | None
    """The step of the newest checkpoint, which is not verified."""
    steps: int | None
    """Number of steps in its plan."""
    tokens: int
    """Tokens that entered the loss so far."""
    loss: float | None
    """On the held-out text if that was measured, else the training loss of the last step."""
    loss_text: LossText | None
    """The text on which `loss` was measured."""
    loss_unit: LossUnit | None
    tokens_per_s: float | None
    """Median over the whole run if it is finished, else over its last 50 steps."""
    parameters: int | None
    """Size of the model."""
    workers: int | None
    updated: datetime
    """When one of its files last changed, in UTC."""
    command: str
    """The whole command that continues it, from the current folder; for a finished run, to twice the steps. Empty if
    there is none."""
    problem: str = ""
    """Why it cannot be read completely, and what to do; empty if it can."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, as in `plait runs --json`."""
        return asdict(self) | {"path": str(self.path), "updated": self.updated.isoformat(timespec="seconds")}


def run_summaries(working: WorkingFolder) -> list[RunSummary]:
    """All runs of a working folder, the most recently changed first. A run that is damaged or half written has a row
    that says so; one that is deleted meanwhile has none."""
    found = [summary for path in run_paths(working) if (summary := summary_of(RunFolder(path), working))]
    return sorted(found, key=lambda one: (-one.updated.timestamp(), one.name))


def run_paths(working: WorkingFolder) -> list[Path]:
    """The folders below runs/ that hold a run or the beginning of one, sorted by name."""
    try:
        found = sorted(working.runs.iterdir())
    except OSError:
        return []
    # plait never names a run with a leading dot or with control characters.
    named = [path for path in found if path.name.isprintable() and not path.name.startswith(".")]
    return [path for path in named if any(os.path.lexists(path / mark) for mark in _MARKS) or not _may_enter(path)]


def _may_enter(path: Path) -> bool:
    """False only for a folder that this user may not look into."""
    return not path.is_dir() or os.access(path, os.R_OK | os.X_OK)


def summary_of(folder: RunFolder, working: WorkingFolder) -> RunSummary | None:
    """The progress of a run; None if its folder is gone."""
    problems: list[str] = []

    def read(part: Callable[[], _T]) -> _T | None:
        """The contents of a file; None, with a sentence in `problems`, if it cannot be read."""
        try:
            return part()
        except PlaitError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{error.filename or folder.path} cannot be read ({error.strerror}); check its permissions")
        return None

    if not _may_enter(folder.path):
        problems.append(f"{folder.path} cannot be read; check the permissions of that folder")
    has_begun = not problems and folder.has_begun
    config = read(folder.saved_config) if has_begun else None
    plan = read(folder.saved_plan) if has_begun else None
    within = max(plan.cadence.evaluate_every_steps if plan else 0, _LINES_BETWEEN_EVALUATIONS) + 2
    steps, evaluation = read(
        lambda: read_last_metrics(folder.metrics, n_steps=_SPEED_STEPS, evaluation_within=within)
    ) or ((), None)
    receipt = read(lambda: read_receipt(folder.receipt) if folder.receipt.exists() else None)
    checkpoints = read(lambda: published_checkpoints(folder.checkpoints)) or ()
    state: RunState | None = read(lambda: run_state(folder, plan, receipt)) if plan else None
    updated = _last_change(folder)
    if updated is None:
        return None  # deleted while its files were read
    loss, text, unit = _loss_of(steps[-1] if steps else None, evaluation)
    speed = receipt.tokens_per_s if receipt and state == "finished" else _recent_speed(folder, steps)
    command, misnamed = _continuing(folder, config.run.name if config else None, plan, state, working)
    return RunSummary(
        name=folder.path.name,
        path=folder.path,
        state="unreadable" if problems or (has_begun and state is None) else state or _unbegun_state(folder),
        step=steps[-1].step if steps else 0,
        step_saved=int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else None,
        steps=plan.job.steps if plan else None,
        tokens=steps[-1].tokens if steps else 0,
        loss=loss,
        loss_text=text,
        loss_unit=unit,
        tokens_per_s=None if speed is None or isnan(speed) else speed,
        parameters=parameter_count(plan.job.shape) if plan else None,
        workers=plan.world_size if plan else None,
        updated=updated,
        command="" if problems else command,
        problem=problems[0] if problems else misnamed,
    )


def run_state(folder: RunFolder, plan: Plan, receipt: Receipt | None) -> RunState:
    """The state of a run that has begun; raises PlaitError if a file of it is damaged."""
    if is_at_work(folder.path, registry_folder()):
        return "training"
    if receipt is not None and receipt.steps >= plan.job.steps:
        return "finished"
    incidents, starts = read_incidents(folder.incidents)[0], read_starts(folder.starts)
    newest = starts[-1].generation if starts else 0
    ended = [one for one in incidents[-1:] if one.decision != "started again" and one.generation >= newest]
    return "failed" if ended else "stopped"


def _unbegun_state(folder: RunFolder) -> ListedState:
    return "starting" if is_at_work(folder.path, registry_folder()) else "not begun"


def _loss_of(
    step: StepReport | None, evaluation: EvalReport | None
) -> tuple[float | None, LossText | None, LossUnit | None]:
    """The newest and most informative loss: per byte before per token, held-out before the last step's."""
    if evaluation is not None and isfinite(evaluation.eval_loss):
        if evaluation.pair_accuracy is not None:
            return evaluation.eval_loss, "held out", "nats per pair"
        if evaluation.eval_nats_per_byte is not None and isfinite(evaluation.eval_nats_per_byte):
            return evaluation.eval_nats_per_byte, "held out", "nats per byte"
        return evaluation.eval_loss, "held out", "nats per token"
    if step is not None and isfinite(step.loss):
        return step.loss, "last step", "nats per token" if step.pair_accuracy is None else "nats per pair"
    return None, None, None


def _recent_speed(folder: RunFolder, steps: Sequence[StepReport]) -> float | None:
    starts: tuple[int, ...] = (0,)
    with suppress(PlaitError, OSError):
        starts = (0, *(one.steps_done for one in read_starts(folder.starts)))
    return median_speed(steps, starts).tokens_per_s if steps else None


def _last_change(folder: RunFolder) -> datetime | None:
    """When one of the run's files last changed; None if its folder is gone."""
    changed = []
    files = (folder.recipe, folder.plan, folder.metrics, folder.receipt, folder.incidents, folder.starts)
    for path in (folder.path, *files):
        with suppress(OSError):
            changed.append(path.stat().st_mtime)
    if not folder.path.exists():
        return None
    return datetime.fromtimestamp(max(changed, default=0.0), UTC)


def _continuing(
    folder: RunFolder, name: str | None, plan: Plan | None, state: RunState | None, working: WorkingFolder
) -> tuple[str, str]:
    """The command that continues a run, empty if there is none; and the reason, if it is a fault of the folder."""
    if name is None or plan is None or (folder.path / "joined.json").exists():
        return "", ""
    if (folder.path / "fetched.json").exists():
        return _from_its_folder(["plait", "fetch", folder.path.name], working), ""
    if name != folder.path.name:
        return "", (
            f"{folder.path} holds the run {name} under another name, by which plait train does not find it; "
            "give the folder that name again to continue it"
        )
    words = ["plait", "train", str(folder.recipe.relative_to(working.path))]
    words += [f"train.budget={2 * plan.job.steps} steps"] if state == "finished" else []
    hosts = len(plan.machines.hosts) + len(plan.machines.left_out)
    words += ["--hosts", str(hosts)] if hosts > 1 else []
    return _from_its_folder(words, working), ""


def _from_its_folder(words: list[str], working: WorkingFolder) -> str:
    here = working.path.absolute() == Path.cwd()
    return shlex.join(words) if here else f"cd {shlex.quote(str(working.path))} && {shlex.join(words)}"
