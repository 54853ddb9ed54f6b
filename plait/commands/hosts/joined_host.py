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
from plait.commands.hosts.file_transfer import IncomingFile, disk_error, facts_from, read_block, safe_path
from plait.commands.hosts.shared_folder import seen
from plait.commands.planning.make_plan import Log
from plait.commands.planning.run_folder import RunFolder, check_changes, hold_lock, locked_folder
from plait.errors import PlaitError
from plait.launch.remote.link import Handler, Reply
from plait.launch.remote.wire import Frame
from plait.recipe.load import load_recipe, parse_config
from plait.report.atomic import replace_file

MARK = "joined.json"
"""In a run's folder that only holds what another host sent."""


class JoinedHostFiles:
    """The files of one joined host below its working folder `base`; close it when the run is over.

    Its handlers run one after another. What this host's user must mend is kept as `trouble`, and told to the leader.
    """

    def __init__(self, base: Path, say: Log) -> None:
        self.trouble: PlaitError | None = None
        self._base, self._say = base, say
        self._held = ExitStack()
        self._shared = self._is_ours = False
        self._folder: Path | None = None
        self._run: Path | None = None
        self._intake: IncomingFile | None = None
        self._is_told = False
        """Whether the intake is worth a line when it is complete."""
        self._received: set[Path] = set()

    def close(self) -> None:
        """Let go of the run's folder, and take away what belonged to single jobs, to a checkpoint that was not saved,
        or to a file of which the rest did not come.

        No rank of this host may live any more.
        """
        if self._intake is not None:
            self._intake.abandon()
        self._release(Frame(kind="release", values={}))
        if self._run is not None:
            clean_staging(self._run / "checkpoints")
            _forget_unless_begun(RunFolder(self._run))
        self._held.close()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What the leader may ask, by kind."""
        answers = {
            "see": self._see,
            "open": self._open,
            "take": self._take,
            "block": self._block,
            "put": self._put,
            "read": self._read,
            "list": self._list,
            "release": self._release,
        }
        return {kind: self._noting(answer) for kind, answer in answers.items()}

    def _noting(self, answer: Handler) -> Handler:
        def noted(frame: Frame) -> Reply:
            try:
                return answer(frame)
            except PlaitError as error:
                self.trouble = error
                raise
            except OSError as error:
                self.trouble = PlaitError(
                    f"this host cannot use {error.filename or self._base} ({error.strerror}); mend that, "
                    "then join again"
                )
                raise self.trouble from error

        return noted

    def _see(self, frame: Frame) -> Reply:
        """Whether the leader's working folder is this one: each nonce lies at its place below it."""
        found = [seen(self._base / one["folder"], one["name"], one["content"]) for one in frame.values["nonces"]]
        self._shared = all(found)
        place = "shared with it" if self._shared else "not shared: what this host needs is sent"
        self._say(f"folder   {self._base} is {place}")
        return Reply(values={"shared": self._shared})

    def _open(self, frame: Frame) -> Reply:
        """Make this host's folder for a run, which stays, or for a single job."""
        if not self._shared:
            self._claim()
        if frame.values["kind"] == "job":
            cache = self._base / ".plait"
            with disk_error(cache / MARK):
                cache.mkdir(exist_ok=True)
                self._folder = Path(tempfile.mkdtemp(prefix="plait-joined-", dir=cache))
            return Reply(values={"folder": str(self._folder)})
        path = safe_path(self._base / "runs", frame.values["name"])
        if self._run is None:
            self._held.enter_context(locked_folder(RunFolder(path)))
            _check_ours(RunFolder(path), frame.values["recipe"])
            self._run = path
            (path / "logs").mkdir(exist_ok=True)
            clean_staging(path / "checkpoints")
            digest = sha256(frame.values["recipe"].encode()).hexdigest()
            replace_file(path / MARK, json.dumps({"recipe": digest}).encode(), failure=PlaitError)
            self._say(f"run      {path}, recipe {digest[:12]}")
        self._folder = path
        return Reply(values={"folder": str(path)})

    def _claim(self) -> None:
        """Hold the working folder until the end: two hosts that are sent the same data would spoil them.

        Raises PlaitError where another one has it. Where it is host 0's, all is there already and many may work in it.
        """
        if self._is_ours:
            return
        cache = self._base / ".plait"
        with disk_error(cache / MARK):
            cache.mkdir(exist_ok=True)
            lock = self._held.enter_context((cache / "joined.lock").open("w"))
        hold_lock(lock, f"another host that joined a run works in {self._base}, too; join from another folder")
        self._is_ours = True

    def _take(self, frame: Frame) -> Reply:
        """Log which of the offered files are lacking here, and be ready for them."""
        root = self._base / ".plait" if frame.values["root"] == "cache" else self._current
        folder = safe_path(root, frame.values["path"])
        if folder.parent.name == "checkpoints" and folder.parent.is_dir():  # only the one to go on from is of use here
            for other in folder.parent.iterdir():
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)
        self._intake = IncomingFile(folder, facts_from(frame.values["files"]))
        self._is_told = root != self._current or self._folder == self._run
        if not self._intake.lacking and root != self._current and folder not in self._received:
            self._say(f"data     {folder}, here already")
        return Reply(values={"folder": str(folder), "lacking": list(self._intake.lacking)})

    def _block(self, frame: Frame) -> Reply:
        """The next bytes of a file that was offered."""
        if self._intake is None:
            raise PlaitError("the host that leads sent a piece of no file; give the same command again")
        self._intake.block(frame.values["name"], frame.values["offset"], frame.blob)
        if self._intake.complete and self._is_told:
            self._received.add(self._intake.folder)
            self._say(f"received {self._intake.folder}")
        return Reply()

    def _put(self, frame: Frame) -> Reply:
        """A small file as a whole."""
        path = safe_path(self._current, frame.values["name"])
        replace_file(path, frame.blob, failure=PlaitError)
        return Reply()

    def _read(self, frame: Frame) -> Reply:
        """Some bytes of a file in the current folder; those of a checkpoint lie in its staging folder."""
        values = frame.values
        folder = self._current / "checkpoints" / _staging(values["staging"]) if "staging" in values else self._current
        size, data = read_block(folder, values["name"], values["offset"], values["bytes"])
        return Reply(values={"size": size}, blob=data)

    def _list(self, frame: Frame) -> Reply:
        """The names of the files in the current folder."""
        return Reply(values={"names": sorted(path.name for path in self._current.iterdir() if path.is_file())})

    def _release(self, frame: Frame) -> Reply:
        """Take away the folder of a single job."""
        if self._folder is not None and self._folder != self._run:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._run
        return Reply()

    @property
    def _current(self) -> Path:
        if self._folder is None:
            raise PlaitError("the host that leads named no folder first; give the same command again")
        return self._folder


def refuse_joined(folder: RunFolder) -> None:
    """Raise PlaitError where a run's folder only holds what another host sent: its checkpoints are there, not here."""
    if (folder.path / MARK).exists():
        raise PlaitError(
            f"{folder.path} was sent here by a host that leads this run (plait join); go on with it there, "
            "or choose another run.name"
        )


def _staging(name: Any) -> str:
    """The staging folder of a checkpoint, by the name that a rank of this host told."""
    if not (isinstance(name, str) and name.startswith(".step-") and name[6:].removesuffix(".staging").isdecimal()):
        raise PlaitError(f"the host that leads asked for {str(name)[:80]!r}, which is no checkpoint; is it plait?")
    return name


def _forget_unless_begun(folder: RunFolder) -> None:
    """Leave nothing of a run that ended before it was all here: a later one of that name may begin on this host."""
    if folder.has_begun:
        return
    for left in (folder.path / MARK, folder.recipe):
        with suppress(OSError):
            left.unlink()
    with suppress(OSError):  # with something in it, which is not ours to take away, it stays
        (folder.path / "logs").rmdir()


def _check_ours(folder: RunFolder, recipe: str) -> None:
    """Raise PlaitError where the folder holds another run, or one that began on this host."""
    if not folder.has_begun:
        return
    if not (folder.path / MARK).exists():
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
