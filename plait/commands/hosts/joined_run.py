"""The folder runs/NAME of a host that joined: it holds what host 0 sent, and nothing else is touched there."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from plait.checkpoint.store import clean_staging
from plait.commands.hosts.file_names import refuse_links
from plait.commands.hosts.requests import CHECKPOINT_NAME
from plait.commands.planning.run_folder import RunFolder, check_changes
from plait.errors import PlaitError
from plait.recipe.load import parse_recipe, read_saved_recipe
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file

_MARKER_FILE = "joined.json"


class JoinedRun:
    """A run's folder that only holds what another host sent; joined.json in it says so, and lists what may go again.

    Raises PlaitError where the folder holds anything of this host's own, or another run. The caller holds its lock.
    """

    def __init__(self, path: Path, recipe: str) -> None:
        self.path = path
        self._folder = RunFolder(path)
        _check_same_run(self._folder, recipe)
        self.recipe_digest = sha256(recipe.encode()).hexdigest()
        self._checkpoints = _listed_checkpoints(path / _MARKER_FILE)
        logs, checkpoints = path / "logs", path / "checkpoints"
        for inner in (logs, *logs.glob("*"), checkpoints):  # where ranks write
            refuse_links(path, inner)
        logs.mkdir(exist_ok=True)
        clean_staging(checkpoints)
        self._write_marker()

    def make_room_for(self, checkpoint: str) -> None:
        """Note that this checkpoint is about to come, and take away those that were sent before it: none is of use
        here but the one to go on from. What was not sent stays."""
        is_new = not (self.path / "checkpoints" / checkpoint).exists()
        for name in self._checkpoints - {checkpoint}:
            self._remove_checkpoint(name)
        self._checkpoints = ({checkpoint} if is_new else set()) | (self._checkpoints & {checkpoint})
        self._write_marker()

    def close(self) -> None:
        """Take away a checkpoint that was not saved; of a run that ended before it was all here leave nothing: a later
        one of that name may begin on this host."""
        clean_staging(self.path / "checkpoints")
        if self._folder.has_begun:
            return
        for name in self._checkpoints:
            self._remove_checkpoint(name)
        for left in (self.path / _MARKER_FILE, self._folder.recipe):
            with suppress(OSError):
                left.unlink()
        for folder in (self.path / "logs", self.path / "checkpoints"):
            with suppress(OSError):  # with something in it, which is not ours to take away, it stays
                folder.rmdir()

    def _remove_checkpoint(self, name: str) -> None:
        path = self.path / "checkpoints" / name
        refuse_links(self.path, path)
        shutil.rmtree(path, ignore_errors=True)

    def _write_marker(self) -> None:
        values = {"recipe": self.recipe_digest, "checkpoints": sorted(self._checkpoints)}
        replace_file(self.path / _MARKER_FILE, json.dumps(values).encode(), failure=PlaitError)


def refuse_joined_folder(folder: RunFolder) -> None:
    """Raise PlaitError where a run's folder only holds what another host sent: its checkpoints are there, not here."""
    if (folder.path / _MARKER_FILE).exists():
        raise PlaitError(
            f"{folder.path} was sent here by a host that leads this run (plait join); go on with it there, "
            "or choose another run.name"
        )


def _listed_checkpoints(marker: Path) -> set[str]:
    """The checkpoints that an earlier start of this run was sent, as joined.json lists them."""
    try:
        names = json.loads(read_regular_file(marker))["checkpoints"]
        return {name for name in names if CHECKPOINT_NAME.fullmatch(name)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # of an earlier version, or damaged
        return set()


def _check_same_run(folder: RunFolder, recipe: str) -> None:
    """Raise PlaitError where the folder holds another run, or anything that was not sent by another host."""
    if not (folder.path / _MARKER_FILE).exists():
        if _holds_own_files(folder.path):
            raise PlaitError(
                f"{folder.path} on this host holds a run of its own; move it away, or join from another folder"
            )
        return
    if not folder.has_begun:
        return
    try:
        check_changes(read_saved_recipe(folder.recipe), parse_recipe(recipe, "the recipe that host 0 sent"))
    except PlaitError as error:
        why = str(error).partition(";")[0]
        raise PlaitError(
            f"{folder.path} on this host is of another recipe ({why}); move it away, then join again"
        ) from None


def _holds_own_files(folder: Path) -> bool:
    """Whether a run's folder has more in it than its lock, logs and empty folders."""
    held = [path for path in folder.iterdir() if path.name not in (".lock", "logs")]
    return any(path.is_symlink() or not path.is_dir() or any(path.iterdir()) for path in held)
