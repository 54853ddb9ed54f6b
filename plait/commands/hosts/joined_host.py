"""What a joined host keeps for a run that another host leads: its folder, its data, its answers to that host."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from plait.commands.hosts.file_names import read_block, refuse_links, safe_path
from plait.commands.hosts.file_transfer import IncomingFolder, append_block, convert_disk_errors
from plait.commands.hosts.job_argument import ReceivedFolders, check_job
from plait.commands.hosts.joined_run import JoinedRun
from plait.commands.hosts.requests import (
    MEND_ODD_REQUEST,
    BlockHeader,
    Offer,
    OpenRequest,
    ReadRequest,
    SharedQuestion,
    SmallFile,
    parse_request,
)
from plait.commands.hosts.shared_folder import has_nonce, working_folder_held
from plait.commands.planning.folder_lock import lock_run_folder
from plait.commands.planning.make_plan import Log
from plait.commands.planning.run_folder import RunFolder
from plait.errors import PlaitError
from plait.launch.remote.link import Handler, Reply
from plait.launch.remote.wire import Frame
from plait.launch.values.job import Job
from plait.planner.plan import Plan
from plait.planner.plan_file import read_plan
from plait.private_folder import make_private_folder, remove_folder_but
from plait.regular_file import read_regular_file


class JoinedHostFiles:
    """The files of one joined host, all below its working folder; close it when the run is over.

    Its handlers run one after another, and while a job runs those that change a file refuse to. An error that this
    host's user must fix is kept in `local_error` and sent to the leader.
    """

    def __init__(self, working_folder: Path, log: Log) -> None:
        self.local_error: PlaitError | None = None
        self._working_folder, self._log = working_folder, log
        self._changes = threading.Lock()
        """Held by a job for as long as it runs, and by each request that changes something here."""
        self._locks = ExitStack()
        self._shares_leader_folder = self._holds_working_folder = False
        self._folder: Path | None = None
        self._run: JoinedRun | None = None
        self._incoming: IncomingFolder | None = None
        self._logs_arrival = False
        """Whether to log a line when all incoming files are complete."""
        self._received: set[Path] = set()
        self._folders = ReceivedFolders()

    def close(self) -> None:
        """Unlock the run's folder, and delete what belongs to single jobs, to a checkpoint that was not saved, or to an
        incomplete file. Logs of a job that failed stay: what ended it may name one.

        Call it when no rank of this host is running any more.
        """
        if self._incoming is not None:
            self._incoming.discard_partial_file()
        if self._folder is not None and not self._in_run_folder:
            remove_folder_but(self._folder, [log for log in self._folder.glob("rank-*.log") if log.stat().st_size])
        if self._run is not None:
            self._run.close()
        self._locks.close()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Handlers of the leader's requests, by kind."""
        changes = {
            "see": self._check_shared,
            "open": self._open,
            "take": self._accept_offer,
            "block": self._write_block,
            "put": self._write_file,
            "release": self._release,
        }
        answers = {"read": self._read, "list": self._list}
        answers |= {kind: self._between_jobs(change) for kind, change in changes.items()}
        return {kind: self._recording_error(answer) for kind, answer in answers.items()}

    @contextmanager
    def running(self, job: Job) -> Iterator[None]:
        """Context for a job of host 0: until it ends nothing here changes, so that its ranks find what was checked.

        Raises PlaitError for a job that would read or write outside of what this run has on this host: its argument
        comes from host 0, and its ranks have all the rights of this host's user.
        """
        with self._changing():
            check_job(job, self._may_use)
            yield

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Never waits: host 0 has its answer before it starts a job, and asks again when it has heard of the end."""
        if not self._changes.acquire(blocking=False):
            raise PlaitError(f"the files of a job change while it runs on this host, and {MEND_ODD_REQUEST}")
        try:
            yield
        finally:
            self._changes.release()

    def _between_jobs(self, change: Handler) -> Handler:
        def guarded(frame: Frame) -> Reply:
            with self._changing():
                return change(frame)

        return guarded

    def _may_use(self, folder: Path) -> bool:
        """Whether a job may work in a folder: the one opened for it, on data that were sent; or any that this host and
        host 0 share."""
        if folder == self._folder:
            plan = read_plan(folder / "plan.json")
            shared = replace(plan, job=replace(plan.job, base="")) if self._is_shared_base(plan) else plan
            return self._folders.allow(shared)
        tops = [(self._working_folder / top).resolve() for top in ("runs", ".plait")]
        is_shared = self._shares_leader_folder and any(folder.resolve().is_relative_to(top) for top in tops)
        return is_shared and self._is_shared_base(read_plan(folder / "plan.json"))

    def _is_shared_base(self, plan: Plan) -> bool:
        """Whether the model that a plan begins with, if any, lies in the folder that this host and host 0 share."""
        base, own = (self._working_folder / plan.job.base).resolve(), self._working_folder.resolve()
        return self._shares_leader_folder and base.is_relative_to(own)

    def _recording_error(self, answer: Handler) -> Handler:
        def recorded(frame: Frame) -> Reply:
            try:
                return answer(frame)
            except PlaitError as error:
                self.local_error = error
                raise
            except OSError as error:
                self.local_error = PlaitError(
                    f"this host cannot use {error.filename or self._working_folder} ({error.strerror}); fix that, "
                    "then join again"
                )
                raise self.local_error from error

        return recorded

    def _check_shared(self, frame: Frame) -> Reply:
        """Whether the leader's working folder is this one: each nonce lies at its place below it."""
        nonces = parse_request(SharedQuestion, frame.values).nonces
        found = [has_nonce(self._working_folder / one.folder, one.name, one.content) for one in nonces]
        before, self._shares_leader_folder = self._shares_leader_folder, bool(found) and all(found)
        place = "shared with it" if self._shares_leader_folder else "not shared: what this host needs is sent"
        if before != self._shares_leader_folder or self._folder is None:  # asked at each start, told once
            self._log(f"folder   {self._working_folder} is {place}")
        return Reply(values={"shared": self._shares_leader_folder})

    def _open(self, frame: Frame) -> Reply:
        """Make this host's folder for a run, which stays, or for a single job."""
        request = parse_request(OpenRequest, frame.values)
        if not (self._shares_leader_folder or self._holds_working_folder):  # shared, it has all its files already
            self._locks.enter_context(working_folder_held(self._working_folder))
            self._holds_working_folder = True
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
        self._folders.forget(folder)
        self._incoming = IncomingFolder(folder, offer.files)
        self._folders.admit(self._incoming)
        self._logs_arrival = in_cache or self._in_run_folder
        if not self._incoming.missing and in_cache and folder not in self._received:
            self._log(f"{offer.content:8} {folder}, here already")
        return Reply(values={"folder": str(folder), "lacking": list(self._incoming.missing)})

    def _write_block(self, frame: Frame) -> Reply:
        """The next bytes of a file that was offered."""
        if self._incoming is None:
            raise PlaitError("the host that leads sent a piece of no file; give the same command again")
        header = parse_request(BlockHeader, frame.values)
        self._incoming.write_block(header.name, header.offset, frame.blob)
        self._folders.admit(self._incoming)
        if self._incoming.is_complete and self._logs_arrival:
            self._received.add(self._incoming.folder)
            self._log(f"received {self._incoming.folder}")
        return Reply()

    def _write_file(self, frame: Frame) -> Reply:
        """The next bytes of a small file, which gets its name, and replaces an earlier one, with the last of them. One
        that is here already, and came whole, needs no room on a disk that may be full by now."""
        request = parse_request(SmallFile, frame.values)
        path = safe_path(self._current_folder, request.name)
        whole = len(frame.blob) if request.nbytes is None else request.nbytes
        if len(frame.blob) == whole:
            with suppress(OSError, ValueError):
                if read_regular_file(path) == frame.blob:
                    return Reply()
        append_block(path, request.offset, frame.blob, nbytes=whole)
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
