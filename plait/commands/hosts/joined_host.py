"""What a joined host keeps for a run that another host leads: its folder, its data, its answers to that host."""

from __future__ import annotations

import json
import shutil
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from plait.checkpoint.store import clean_staging
from plait.commands.hosts.file_transfer import (
    IncomingFolder,
    convert_disk_errors,
    file_entries_from,
    read_block,
    safe_path,
)
from plait.commands.hosts.shared_folder import has_nonce
from plait.commands.planning.make_plan import Log
from plait.commands.planning.run_folder import RunFolder, check_changes, hold_lock, lock_run_folder
from plait.errors import PlaitError
from plait.launch.remote.link import Handler, Reply
from plait.launch.remote.wire import Frame
from plait.recipe.load import load_recipe, parse_config
from plait.report.atomic import replace_file

JOINED_MARKER_FILE = "joined.json"
"""Marks a run's folder that only holds what another host sent."""


class JoinedHostFiles:
    """The files of one joined host, all below its working folder; close it when the run is over.

    Its handlers run one after another. An error that this host's user must mend is kept in `local_error` and sent to
    the leader.
    """

    def __init__(self, working_folder: Path, log: Log) -> None:
        self.local_error: PlaitError | None = None
        self._working_folder, self._log = working_folder, log
        self._locks = ExitStack()
        self._shares_leader_folder = self._holds_working_folder = False
        self._folder: Path | None = None
        self._run_folder: Path | None = None
        self._incoming: IncomingFolder | None = None
        self._logs_arrival = False
        """Whether to log a line when all incoming files are complete."""
        self._received: set[Path] = set()

    def close(self) -> None:
        """Unlock the run's folder, and delete what belongs to single jobs, to a checkpoint that was not saved, or to an
        incomplete file.

        Call it when no rank of this host is running any more.
        """
        if self._incoming is not None:
            self._incoming.discard_partial_file()
        self._release(Frame(kind="release", values={}))
        if self._run_folder is not None:
            clean_staging(self._run_folder / "checkpoints")
            _remove_unless_begun(RunFolder(self._run_folder))
        self._locks.close()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Handlers of the leader's requests, by kind."""
        answers = {
            "see": self._check_shared,
            "open": self._open,
            "take": self._accept_offer,
            "block": self._write_block,
            "put": self._write_file,
            "read": self._read,
            "list": self._list,
            "release": self._release,
        }
        return {kind: self._recording_error(answer) for kind, answer in answers.items()}

    def _recording_error(self, answer: Handler) -> Handler:
        def recorded(frame: Frame) -> Reply:
            try:
                return answer(frame)
            except PlaitError as error:
                self.local_error = error
                raise
            except OSError as error:
                self.local_error = PlaitError(
                    f"this host cannot use {error.filename or self._working_folder} ({error.strerror}); mend that, "
                    "then join again"
                )
                raise self.local_error from error

        return recorded

    def _check_shared(self, frame: Frame) -> Reply:
        """Find out whether the leader works in the same folder: then every nonce lies at its path below this one."""
        found = [
            has_nonce(self._working_folder / one["folder"], one["name"], one["content"])
            for one in frame.values["nonces"]
        ]
        self._shares_leader_folder = all(found)
        place = "shared with it" if self._shares_leader_folder else "not shared: what this host needs is sent"
        self._log(f"folder   {self._working_folder} is {place}")
        return Reply(values={"shared": self._shares_leader_folder})

    def _open(self, frame: Frame) -> Reply:
        """Create this host's folder for a run, which is kept, or for a single job, which is temporary."""
        if not self._shares_leader_folder:
            self._lock_working_folder()
        if frame.values["kind"] == "job":
            cache = self._working_folder / ".plait"
            with convert_disk_errors(cache / JOINED_MARKER_FILE):
                cache.mkdir(exist_ok=True)
                self._folder = Path(tempfile.mkdtemp(prefix="plait-joined-", dir=cache))
            return Reply(values={"folder": str(self._folder)})
        path = safe_path(self._working_folder / "runs", frame.values["name"])
        if self._run_folder is None:
            self._locks.enter_context(lock_run_folder(RunFolder(path)))
            _check_same_run(RunFolder(path), frame.values["recipe"])
            self._run_folder = path
            (path / "logs").mkdir(exist_ok=True)
            clean_staging(path / "checkpoints")
            digest = sha256(frame.values["recipe"].encode()).hexdigest()
            replace_file(path / JOINED_MARKER_FILE, json.dumps({"recipe": digest}).encode(), failure=PlaitError)
            self._log(f"run      {path}, recipe {digest[:12]}")
        self._folder = path
        return Reply(values={"folder": str(path)})

    def _lock_working_folder(self) -> None:
        """Lock the working folder until `close`: two hosts that received the same data in it would damage them.

        Raises PlaitError where another host holds it. A folder shared with host 0 needs no lock: it has all files.
        """
        if self._holds_working_folder:
            return
        cache = self._working_folder / ".plait"
        with convert_disk_errors(cache / JOINED_MARKER_FILE):
            cache.mkdir(exist_ok=True)
            lock = self._locks.enter_context((cache / "joined.lock").open("w"))
        hold_lock(
            lock, f"another host that joined a run works in {self._working_folder}, too; join from another folder"
        )
        self._holds_working_folder = True

    def _accept_offer(self, frame: Frame) -> Reply:
        """Log which of the offered files are lacking here, and be ready for them."""
        root = self._working_folder / ".plait" if frame.values["root"] == "cache" else self._current_folder
        folder = safe_path(root, frame.values["path"])
        if folder.parent.name == "checkpoints" and folder.parent.is_dir():  # only the one to resume from is needed
            for other in folder.parent.iterdir():
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)
        self._incoming = IncomingFolder(folder, file_entries_from(frame.values["files"]))
        self._logs_arrival = root != self._current_folder or self._folder == self._run_folder
        if not self._incoming.missing and root != self._current_folder and folder not in self._received:
            self._log(f"data     {folder}, here already")
        return Reply(values={"folder": str(folder), "lacking": list(self._incoming.missing)})

    def _write_block(self, frame: Frame) -> Reply:
        """The next bytes of a file that was offered."""
        if self._incoming is None:
            raise PlaitError("the host that leads sent a piece of no file; give the same command again")
        self._incoming.write_block(frame.values["name"], frame.values["offset"], frame.blob)
        if self._incoming.is_complete and self._logs_arrival:
            self._received.add(self._incoming.folder)
            self._log(f"received {self._incoming.folder}")
        return Reply()

    def _write_file(self, frame: Frame) -> Reply:
        """A small file as a whole."""
        path = safe_path(self._current_folder, frame.values["name"])
        replace_file(path, frame.blob, failure=PlaitError)
        return Reply()

    def _read(self, frame: Frame) -> Reply:
        """Some bytes of a file in the current folder; those of a checkpoint lie in its staging folder."""
        values = frame.values
        folder = (
            self._current_folder / "checkpoints" / _checked_staging_name(values["staging"])
            if "staging" in values
            else self._current_folder
        )
        size, data = read_block(folder, values["name"], values["offset"], values["bytes"])
        return Reply(values={"size": size}, blob=data)

    def _list(self, frame: Frame) -> Reply:
        """The names of the files in the current folder."""
        return Reply(values={"names": sorted(path.name for path in self._current_folder.iterdir() if path.is_file())})

    def _release(self, frame: Frame) -> Reply:
        """Take away the folder of a single job."""
        if self._folder is not None and self._folder != self._run_folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._run_folder
        return Reply()

    @property
    def _current_folder(self) -> Path:
        if self._folder is None:
            raise PlaitError("the host that leads named no folder first; give the same command again")
        return self._folder


def refuse_joined_folder(folder: RunFolder) -> None:
    """Raise PlaitError where a run's folder only holds what another host sent: its checkpoints are there, not here."""
    if (folder.path / JOINED_MARKER_FILE).exists():
        raise PlaitError(
            f"{folder.path} was sent here by a host that leads this run (plait join); go on with it there, "
            "or choose another run.name"
        )


def _checked_staging_name(name: Any) -> str:
    """The name of a checkpoint's staging folder as a rank of this host sent it; raises PlaitError for any other
    name."""
    if not (isinstance(name, str) and name.startswith(".step-") and name[6:].removesuffix(".staging").isdecimal()):
        raise PlaitError(f"the host that leads asked for {str(name)[:80]!r}, which is no checkpoint; is it plait?")
    return name


def _remove_unless_begun(folder: RunFolder) -> None:
    """Delete the folder of a run that ended before all its files had arrived, so that its name is free again."""
    if folder.has_begun:
        return
    for left in (folder.path / JOINED_MARKER_FILE, folder.recipe):
        with suppress(OSError):
            left.unlink()
    with suppress(OSError):  # with something in it, which is not ours to take away, it stays
        (folder.path / "logs").rmdir()


def _check_same_run(folder: RunFolder, recipe: str) -> None:
    """Raise PlaitError where the folder holds another run, or one that began on this host."""
    if not folder.has_begun:
        return
    if not (folder.path / JOINED_MARKER_FILE).exists():
        raise PlaitError(
            f"{folder.path} on this host holds a run of its own; move it away, or join from another folder"
        )
    try:
        check_changes(load_recipe(folder.recipe), parse_config(tomllib.loads(recipe)))
    except PlaitError as error:
        why = str(error).partition(";")[0]
        raise PlaitError(
            f"{folder.path} on this host is of another recipe ({why}); move it away, then join again"
        ) from None
