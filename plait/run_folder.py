"""A run's folder, runs/NAME: who may write it, what it was begun with, what may still change."""

from __future__ import annotations

import difflib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, TextIO

from plait.checked_json import parse_object, sealed_text, typed_value
from plait.checkpoint.store import FoundCheckpoint, clean_staging, newest_good
from plait.errors import PlaitError, RunFailed, disk_advice, is_out_of_space
from plait.planner.plan import Plan, same_hosts, without_marks
from plait.planner.plan_file import plan_text, read_plan
from plait.planner.rebalancing.stage_repartition import stage_costs_of
from plait.private_folder import make_private_folder
from plait.recipe.load import flat_values, read_saved_recipe, recipe_text
from plait.recipe.schema import RunConfig
from plait.regular_file import append_to_file, read_regular_file
from plait.report.atomic import replace_file, replace_files
from plait.report.metrics import trim_metrics
from plait.report.receipt_file import read_receipt
from plait.report.shares_file import check_lines
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

WORKER_KEYS = ("run.devices", "run.workers", "run.threads")
NEW_PLAN_KEYS = ("layout.", "train.matmul_backend", *WORKER_KEYS)
"""Recipe keys that may change how a begun run is carried out: it is planned again."""
CHANGEABLE_KEYS = ("train.budget", *NEW_PLAN_KEYS, "balance.", "checkpoint.", "recover.", "report.", "plan.")
"""Recipe keys that may differ when a begun run continues; `data.files` may move, too, as long as the text is the
same."""


@dataclass(frozen=True, slots=True)
class RunTotals:
    """A receipt's values that are not in metrics.jsonl: training time, and the peak memory of each device."""

    wall_s: float = 0.0
    device_s: float = 0.0
    """Seconds of training times the number of devices, summed over sessions."""
    peak_tensor_bytes: Sequence[int] = ()
    peak_rss_bytes: Sequence[int] = ()
    save_s: float = 0.0
    """Part of the training time: from the beginnings of saves to their ends."""
    start_s: float = 0.0
    """Part of the training time: from each start of the workers to its first step."""
    copy_s: float = 0.0
    """Part of the training time: for which copies of the state in memory held up the workers."""
    copies: int = 0
    """How many such copies there were."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run; see the guide "A run's folder"."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def receipt(self) -> Path:
        return self.path / "receipt.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def shares(self) -> Path:
        return self.path / "shares.jsonl"

    @property
    def rank_times(self) -> Path:
        """How each rank spent its steps, for people who look on; nothing that a run needs."""
        return self.path / "rank-times.jsonl"

    @property
    def samples(self) -> Path:
        """The model's texts at certain steps; the run does not need them."""
        return self.path / "samples.jsonl"

    @property
    def incidents(self) -> Path:
        """One line for each time that the run was ended by a failure, whether it then went on by itself or not."""
        return self.path / "incidents.jsonl"

    @property
    def starts(self) -> Path:
        """One line for each start of the workers: its number, and the steps done before it."""
        return self.path / "starts.jsonl"

    @property
    def base(self) -> Path:
        """The small files of the model that the run goes on from: config, tokenizer, licence; no weights."""
        return self.path / "base"

    @property
    def totals_file(self) -> Path:
        return self.path / "so-far.json"

    @property
    def has_begun(self) -> bool:
        return self.plan.exists() and self.recipe.exists()

    @property
    def is_finished(self) -> bool:
        """Whether the run did all the steps that its plan has now."""
        return self.receipt.exists() and read_receipt(self.receipt).steps >= self.saved_plan().job.steps

    def saved_config(self) -> RunConfig:
        """The recipe that the run was begun with, as last changed."""
        return read_saved_recipe(self.recipe)

    def saved_plan(self) -> Plan:
        return read_plan(self.plan)

    def save_config_and_plan(self, config: RunConfig, plan: Plan, *, is_replanned: bool = False) -> None:
        """Make this recipe and plan the run's current ones.

        An earlier plan that differs is kept as plan-1.json, plan-2.json, …. If the layout differs, or the plan is new
        (`is_replanned`), shares.jsonl is set aside as well, as shares-1.jsonl and so on. Raises PlaitError where
        shares.jsonl cannot be obeyed.
        """
        number = 1
        while any((self.path / name).exists() for name in (f"plan-{number}.json", f"shares-{number}.jsonl")):
            number += 1
        if self.plan.exists() and not _is_same_plan(self.saved_plan(), plan):
            (self.path / f"plan-{number}.json").write_bytes(read_regular_file(self.plan))
        other = self.plan.exists() and (is_replanned or _splits_differently(self.saved_plan(), plan))
        files = {self.plan: plan_text(plan).encode(), self.recipe: recipe_text(config).encode()}
        if not (self.shares.exists() and other):  # one that was there before the run is to be obeyed
            check_lines(
                self.shares,
                plan.sequences_per_replica,
                plan.placement.layout.stage_layers if stage_costs_of(plan) else (),
            )
            replace_files(files, failure=PlaitError)
            return
        kept = self.path / f"shares-{number}.jsonl"
        try:
            replace_files(files, before=lambda: self.shares.rename(kept), failure=PlaitError)
        except PlaitError:
            if kept.exists():  # the old plan stays, and so do the shares that it was carried out with
                kept.rename(self.shares)
            raise

    def find_checkpoint(self) -> FoundCheckpoint | None:
        """The newest checkpoint that verifies; None for a run that has none yet. Raises PlaitError where there are some
        and none is whole."""
        self.checkpoints.mkdir(exist_ok=True)
        clean_staging(self.checkpoints)
        return newest_good(self.checkpoints)

    def prepare_resume(self, known: FoundCheckpoint | None = None) -> FoundCheckpoint | None:
        """The newest checkpoint that verifies, with the metrics cut back to it; None for a run that has none yet. One
        that was found just now is taken as `known`."""
        found = known or self.find_checkpoint()
        trim_metrics(self.metrics, found.manifest.step if found else 0)
        return found

    def prepare_resume_at(self, step: int) -> None:
        """Cut the metrics back to a step whose state is in memory; no checkpoint is read."""
        self.checkpoints.mkdir(exist_ok=True)
        clean_staging(self.checkpoints)
        trim_metrics(self.metrics, step)

    @property
    def totals(self) -> RunTotals:
        """The totals over all sessions of the run so far."""
        path = self.totals_file
        try:
            return typed_value(RunTotals, parse_object(read_regular_file(path))) if path.exists() else RunTotals()
        except (OSError, ValueError) as error:
            raise PlaitError(
                f'"{path}" is not usable ({error}); delete it: the receipt then lacks earlier sessions'
            ) from None

    def write_totals(self, totals: RunTotals) -> None:
        """Save the totals so far, for the receipt at the end of a later session."""
        replace_file(self.totals_file, sealed_text(asdict(totals)).encode())


def _is_same_plan(old: Plan, new: Plan) -> bool:
    return _without_marks(old) == _without_marks(new)


def _without_marks(plan: Plan) -> Plan:
    hosts, left_out = without_marks(plan.machines.hosts), without_marks(plan.machines.left_out)
    return replace(plan, machines=replace(plan.machines, hosts=hosts, left_out=left_out))


def _splits_differently(old: Plan, new: Plan) -> bool:
    return (old.placement.layout, old.sequences_per_replica) != (
        new.placement.layout,
        new.sequences_per_replica,
    ) or not same_hosts(old.machines.hosts, new.machines.hosts)


def run_folder(name: str, working: WorkingFolder = CURRENT_FOLDER) -> RunFolder:
    """The folder of the run of that name."""
    return RunFolder(working.runs / name)


def find_run(name_or_path: str, working: WorkingFolder = CURRENT_FOLDER) -> RunFolder:
    """The folder of a run given by path or name, for commands that read it; raises PlaitError where there is none, or
    where this user may not read it."""
    for path in (working.path / name_or_path, working.runs / name_or_path):
        folder = RunFolder(path)
        if _holds_run(folder):
            return folder
    half = working.runs / name_or_path
    if half.parent == working.runs and half.name.isprintable() and _is_folder(half):
        raise PlaitError(
            f"{half} holds no run that has begun (plan.json or recipe.toml is missing); give its plait train again"
        )
    runs = working.runs.absolute()
    known = run_names(working)
    near = difflib.get_close_matches(name_or_path, known, n=3) or known[:10]
    hint = (
        f"the runs there: {', '.join(near)}"
        if near
        else "go to where it was trained, or train one with: plait train RECIPE"
    )
    raise PlaitError(f'there is no run "{name_or_path}" in {runs}; {hint}')


def run_names(working: WorkingFolder) -> list[str]:
    """The names of all runs that have begun, sorted."""
    return sorted(path.name for path in working.runs.glob("*") if _holds_run(RunFolder(path)))


def _holds_run(folder: RunFolder) -> bool:
    # plait gives no run a name with signs that a terminal obeys, or with a dot before it.
    name = folder.path.name
    return name.isprintable() and not name.startswith(".") and _is_file(folder.plan) and _is_file(folder.recipe)


def _is_file(path: Path) -> bool:
    try:
        return S_ISREG(path.stat().st_mode)  # Path.is_file of newer Pythons hides that it may not look
    except PermissionError as error:
        raise PlaitError(
            f"{path.parent} cannot be read ({error.strerror}); check the permissions of that folder and "
            "of those above it"
        ) from None
    except (OSError, ValueError):  # ValueError: no path at all
        return False


def _is_folder(path: Path) -> bool:
    try:
        return S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError):  # no path at all
        return False


def check_changes(old: RunConfig, new: RunConfig) -> list[str]:
    """The keys that differ from the begun run's recipe; raises PlaitError that names all that may not change."""
    before, after = flat_values(old), flat_values(new)
    if before.get("optimizer.kind") == "adamw" and after.get("optimizer.kind") == "auto":  # the default of 0.2.0
        after = {**after, "optimizer.kind": "adamw"}
    # 0.2.0 wrote DPO's beta into every recipe; "auto" means the same number, but of SimPO, which it did not have.
    if (before.get("finetune.beta"), after.get("finetune.beta")) == (0.1, "auto"):
        after = after if after.get("finetune.objective") == "simpo" else {**after, "finetune.beta": 0.1}
    changed = [key for key in sorted(before | after) if before.get(key) != after.get(key)]
    fixed = [key for key in changed if key != "data.files" and not key.startswith(CHANGEABLE_KEYS)]
    if fixed:
        changes = [
            f"{key} was {_value_text(before.get(key))} when this run began and is {_value_text(after.get(key))} now"
            for key in fixed
        ]
        raise PlaitError(
            ", ".join(changes), f"change {'it' if len(fixed) == 1 else 'them'} back, or choose another run.name"
        )
    return changed


def _value_text(value: Any) -> str:
    return "not given" if value is None else json.dumps(value, ensure_ascii=False)


_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}


class FolderTaken(PlaitError):
    """Another process works in a folder; it may end."""


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextmanager
def lock_run_folder(folder: RunFolder) -> Iterator[Callable[[], None]]:
    """Hold the run's folder for this process; raises PlaitError when another one trains in it, or the disk says no.

    Yields a function that raises RunFailed if the folder was moved, deleted or replaced since; so does the block where
    it fails for that reason. Of a run that did not begin nothing is left.
    """
    path = folder.path / ".lock"
    is_first = not folder.path.parent.exists()
    try:
        make_private_folder(folder.path)
        _refuse_links(folder.path)
        lock = append_to_file(path)
    except OSError as error:
        raise PlaitError(f'"{folder.path}" cannot be written ({error.strerror}); choose another place') from None
    with lock:
        taken = f'another plait is training in "{folder.path}"; wait for it, or choose another run.name'
        hold_lock(lock, taken)
        if not _is_same_file(path, lock):
            raise FolderTaken(taken)  # its holder took the file away after we had opened it
        for left in folder.path.glob(".*.new"):  # by a plait that was killed
            left.unlink(missing_ok=True)

        def require_present() -> None:
            if not _is_same_file(path, lock):
                raise RunFailed(
                    f'"{folder.path}" was moved or deleted while its run worked, which was therefore ended; move it '
                    "back to go on from its newest checkpoint, or give the same command again to start over"
                )

        try:
            yield require_present
        except (OSError, PlaitError) as error:
            require_present()
            if isinstance(error, PlaitError) or not (error.errno in _DISK_ERRNOS or is_out_of_space(error)):
                raise
            raise PlaitError(
                f"{error.filename or folder.path}: {error.strerror or error}; "
                f"{disk_advice(error)}, then give the same command again"
            ) from error
        finally:
            if _is_same_file(path, lock):
                _remove_if_only_lock(folder.path)
                if is_first:
                    with suppress(OSError):  # with a run in it, it stays
                        folder.path.parent.rmdir()


def _refuse_links(folder: Path) -> None:
    """Raise PlaitError for a link in the place of one of the run's files: what it leads to would be overwritten.

    Its folders, such as checkpoints/ on a larger disk, may be links.
    """
    for path in folder.iterdir():
        if path.is_symlink() and not path.is_dir():
            raise PlaitError(f'"{path}" is a link, and plait would write where it leads; put the file itself there')


def _is_same_file(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _remove_if_only_lock(path: Path) -> None:
    """Delete a run's folder that holds nothing but its lock."""
    with suppress(OSError):
        if [held.name for held in path.iterdir()] == [".lock"]:
            (path / ".lock").unlink()
            path.rmdir()


def hold_lock(lock: TextIO, refusal: str) -> None:
    """Lock an open file until it is closed or the process ends; raises FolderTaken(`refusal`) if it is locked, and
    PlaitError where its disk has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise PlaitError(
                f'the disk of "{lock.name}" has no locks ({error.strerror}), and two runs could write one folder; have '
                "it mounted with locks (Lustre: -o flock, NFS: a server with lockd), or make runs/ a link elsewhere"
            ) from None
        raise FolderTaken(refusal) from None
