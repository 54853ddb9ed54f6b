"""What a joined host keeps for a run that another host leads: its folder, its data, its answers to that host."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from plait.commands.hosts.file_names import read_block, refuse_links, safe_path
from plait.commands.hosts.file_transfer import IncomingFolder, convert_disk_errors
from plait.commands.hosts.job_argument import read_job_argument
from plait.commands.hosts.joined_run import JoinedRun
from plait.commands.hosts.requests import (
    CHECKPOINT_NAME,
    BlockHeader,
    Offer,
    OpenRequest,
    ReadRequest,
    SharedQuestion,
    SmallFile,
    parse_request,
)
from plait.commands.hosts.shared_folder import has_nonce
from plait.commands.planning.folder_lock import hold_lock, lock_run_folder
from plait.commands.planning.make_plan import Log
from plait.commands.planning.run_folder import RunFolder
from plait.commands.planning.workers import MEASURE_ENTRY, PROBE_ENTRY, PRODUCTS_ENTRY
from plait.errors import PlaitError
from plait.launch.remote.link import Handler, Reply
from plait.launch.remote.wire import Frame
from plait.launch.values.job import Job
from plait.planner.plan_file import read_plan
from plait.private_folder import make_private_folder
from plait.report.atomic import replace_file

_LEADER_ASKS_ODDLY = "the host that leads asks for it; install the same commit of plait on both"


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
        self._run: JoinedRun | None = None
        self._incoming: IncomingFolder | None = None
        self._logs_arrival = False
        """Whether to log a line when all incoming files are complete."""
        self._received: set[Path] = set()
        self._corpora: set[Path] = set()
        """Prepared data that host 0 offered, and so has itself."""

    def close(self) -> None:
        """Unlock the run's folder, and delete what belongs to single jobs, to a checkpoint that was not saved, or to an
        incomplete file.

        Call it when no rank of this host is running any more.
        """
        if self._incoming is not None:
            self._incoming.discard_partial_file()
        self._remove_job_folder()
        if self._run is not None:
            self._run.close()
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

    def check_job(self, job: Job) -> None:
        """Raise PlaitError for a job that would read or write outside of what this run has on this host.

        Its argument comes from host 0, and its ranks have all the rights of this host's user.
        """
        if job.entry in (MEASURE_ENTRY, PROBE_ENTRY, PRODUCTS_ENTRY):  # without files
            if job.log_dir is not None:
                raise PlaitError(f"{job.entry} has no logs, and {_LEADER_ASKS_ODDLY}")
            return
        asked = read_job_argument(job.argument)
        if asked.resume is not None and not CHECKPOINT_NAME.fullmatch(asked.resume):
            raise PlaitError(f"{asked.resume[:80]!r} is no checkpoint, and {_LEADER_ASKS_ODDLY}")
        if job.log_dir not in (None, asked.folder, f"{asked.folder}/logs") or not self._may_use(Path(asked.folder)):
            raise PlaitError(f"{asked.folder[:200]} is no folder of this run on this host, and {_LEADER_ASKS_ODDLY}")

    def _may_use(self, folder: Path) -> bool:
        """Whether a job may work in a folder: the one opened for it, on data that were sent; or any that this host and
        host 0 share."""
        if folder == self._folder:
            return Path(read_plan(folder / "plan.json").corpus) in self._corpora
        tops = [(self._working_folder / top).resolve() for top in ("runs", ".plait")]
        return self._shares_leader_folder and any(folder.resolve().is_relative_to(top) for top in tops)

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
        """Whether the leader's working folder is this one: each nonce lies at its place below it."""
        nonces = parse_request(SharedQuestion, frame.values).nonces
        found = [has_nonce(self._working_folder / one.folder, one.name, one.content) for one in nonces]
        self._shares_leader_folder = bool(found) and all(found)
        place = "shared with it" if self._shares_leader_folder else "not shared: what this host needs is sent"
        self._log(f"folder   {self._working_folder} is {place}")
        return Reply(values={"shared": self._shares_leader_folder})

    def _open(self, frame: Frame) -> Reply:
        """Make this host's folder for a run, which stays, or for a single job."""
        request = parse_request(OpenRequest, frame.values)
        if not self._shares_leader_folder:
            self._lock_working_folder()
        if request.kind == "job":
            cache = self._working_folder / ".plait"
            with convert_disk_errors(cache / "joined"):
                make_private_folder(cache)
                self._remove_job_folder()
                self._folder = Path(tempfile.mkdtemp(prefix="plait-joined-", dir=cache))
        else:
            self._folder = self._open_run(request)
        return Reply(values={"folder": str(self._folder)})

    def _open_run(self, request: OpenRequest) -> Path:
        """The folder of the one run that this host joined."""
        path = self._working_folder / "runs" / request.name
        if self._run is None:
            self._locks.enter_context(lock_run_folder(RunFolder(path)))
            self._run = JoinedRun(path, request.recipe)
            self._log(f"run      {path}, recipe {self._run.recipe_digest[:12]}")
        elif path != self._run.path:
            raise PlaitError(f"the host that leads named a second run, {request.name!r}; join again")
        return path

    def _lock_working_folder(self) -> None:
        """Lock the working folder until `close`: two hosts that received the same data in it would damage them.

        Raises PlaitError where another host holds it. A folder shared with host 0 needs no lock: it has all files.
        """
        if self._holds_working_folder:
            return
        cache = self._working_folder / ".plait"
        with convert_disk_errors(cache / "joined"):
            make_private_folder(cache)
            lock = self._locks.enter_context((cache / "joined.lock").open("w"))
        hold_lock(
            lock, f"another host that joined a run works in {self._working_folder}, too; join from another folder"
        )
        self._holds_working_folder = True

    def _accept_offer(self, frame: Frame) -> Reply:
        """Log which of the offered files are lacking here, and be ready for them."""
        offer = parse_request(Offer, frame.values)
        in_cache = offer.root == "cache"
        root = self._working_folder / ".plait" if in_cache else self._current_folder
        # Apart from what this host itself prepared: nobody's own data are replaced by what somebody else sends.
        received = "received" if in_cache and not self._shares_leader_folder else ""
        folder = root / received / offer.path
        refuse_links(root, folder)
        if offer.checkpoint and self._run is not None and root == self._run.path:
            self._run.make_room_for(offer.checkpoint)
        self._incoming = IncomingFolder(folder, offer.files)
        if any(entry.name == "index.json" for entry in offer.files):
            self._corpora.add(folder)
        self._logs_arrival = in_cache or self._in_run_folder
        if not self._incoming.missing and in_cache and folder not in self._received:
            self._log(f"data     {folder}, here already")
        return Reply(values={"folder": str(folder), "lacking": list(self._incoming.missing)})

    def _write_block(self, frame: Frame) -> Reply:
        """The next bytes of a file that was offered."""
        if self._incoming is None:
            raise PlaitError("the host that leads sent a piece of no file; give the same command again")
        header = parse_request(BlockHeader, frame.values)
        self._incoming.write_block(header.name, header.offset, frame.blob)
        if self._incoming.is_complete and self._logs_arrival:
            self._received.add(self._incoming.folder)
            self._log(f"received {self._incoming.folder}")
        return Reply()

    def _write_file(self, frame: Frame) -> Reply:
        """A small file as a whole."""
        path = safe_path(self._current_folder, parse_request(SmallFile, frame.values).name)
        replace_file(path, frame.blob, failure=PlaitError)
        return Reply()

    def _read(self, frame: Frame) -> Reply:
        """Some bytes of a file in the current folder; those of a checkpoint lie in its staging folder."""
        request, folder = parse_request(ReadRequest, frame.values), self._current_folder
        if request.staging is not None:
            folder = folder / "checkpoints" / request.staging
            refuse_links(self._current_folder, folder)
        size, data = read_block(folder, request.name, request.offset, request.bytes)
        return Reply(values={"size": size}, blob=data)

    def _list(self, frame: Frame) -> Reply:
        """The names of the files in the current folder."""
        return Reply(values={"names": sorted(path.name for path in self._current_folder.iterdir() if path.is_file())})

    def _release(self, frame: Frame) -> Reply:
        """Take away the folder of a single job."""
        self._remove_job_folder()
        return Reply()

    def _remove_job_folder(self) -> None:
        if self._folder is not None and not self._in_run_folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._run.path if self._run else None

    @property
    def _in_run_folder(self) -> bool:
        return self._run is not None and self._folder == self._run.path

    @property
    def _current_folder(self) -> Path:
        if self._folder is None:
            raise PlaitError("the host that leads named no folder first; give the same command again")
        return self._folder
