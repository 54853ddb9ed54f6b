"""The files of a job on a joined host: what host 0 sends there once (recipe, plan, prepared data, weights, checkpoint),
what that host keeps of it, and what a job may use there."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from plait.checkpoint.store import clean_staging
from plait.data.shards import open_corpus
from plait.errors import PlaitError, RunFailed
from plait.hosts.files import (
    CHECKPOINT_NAME,
    OFFER_FILES,
    READ_FILE,
    SEND_BLOCK,
    BlockHeader,
    FileEntry,
    IncomingFolder,
    Offer,
    OfferReply,
    ReadRequest,
    check_file_name,
    convert_disk_errors,
    fetch_file,
    file_entries_of,
    named_entries,
    read_block,
    refuse_links,
    require_valid,
    safe_path,
    send_folder,
    send_offer,
)
from plait.hosts.joining import HostInfo
from plait.hosts.leader import HostPart
from plait.hosts.protocol import DONE, ODD_REQUEST_ADVICE, Handlers, Nothing, Peer, ReadReply, Reply, RequestKind
from plait.hosts.shared_folder import (
    SEE_FOLDER,
    Nonce,
    SharedQuestion,
    SharedReply,
    has_nonce,
    mount_of,
    shared_folder_lines,
    working_folder_held,
    write_nonce,
)
from plait.interop.base_model import CONFIG, needed_files, read_base_model
from plait.launch.values.failure import HostNotServed
from plait.launch.values.job import Job
from plait.planner.plan import HostShare, Plan
from plait.planner.plan_file import plan_text, read_plan, write_plan
from plait.private_folder import make_private_folder, remove_folder_but
from plait.recipe.load import parse_recipe, read_saved_recipe
from plait.regular_file import SMALL_FILE_BYTES, read_regular_file, read_regular_text
from plait.report.atomic import replace_file
from plait.run_folder import RunFolder, check_changes, lock_run_folder
from plait.screen.screen import Log
from plait.units import format_bytes
from plait.workers import MACHINE_CHECK_ENTRY, MEASURE_ENTRY, PROBE_ENTRY, PRODUCTS_ENTRY, ROUTING, TRAINING_ENTRY
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

_T = TypeVar("_T")
_Handler = Callable[[Any, bytes], Reply[Any]]
_MOUNTS = Path("/proc/self/mountinfo")


StagedKind = Literal["run", "job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """Have a folder ready for the run `name`, or for one job; what follows is about this folder."""

    kind: StagedKind
    name: str
    recipe: str

    def __post_init__(self) -> None:
        require_valid(check_file_name(self.name), "OpenRequest.name")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReply:
    """Where the folder lies that the host was asked to have ready."""

    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesReply:
    """The names of the files in the current folder."""

    names: tuple[str, ...]


OPEN_FOLDER = RequestKind(name="open", question=OpenRequest, reply=FolderReply)
LIST_FILES = RequestKind(name="list", question=Nothing, reply=NamesReply)
RELEASE_FOLDER = RequestKind(name="release", question=Nothing, reply=Nothing)


class JoinedHost(Peer, Protocol):
    """A joined host: plait.hosts.membership.Member, or a test's own."""

    @property
    def host(self) -> int: ...
    @property
    def host_info(self) -> HostInfo: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFolder:
    """Where a job's folder is on another host, and whether it is the same folder as on host 0."""

    path: str
    is_shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A folder whose files travel."""

    path: Path
    entries: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagedFiles:
    """The files that a host needs before a job can begin, unless it shares the job's folder with host 0."""

    kind: StagedKind
    folder: Path
    corpus: _Sent
    base: _Sent | None
    """The model whose weights a job begins with; None where it draws them."""
    checkpoint: _Sent | None


class FileStager:
    """Copies what a job needs from host 0 to every joined host, and the files that its ranks left back."""

    def __init__(
        self,
        members: Sequence[JoinedHost],
        run_folder: Path,
        log: Log,
        working: WorkingFolder = CURRENT_FOLDER,
    ) -> None:
        self._members, self._log, self._working = members, log, working
        self._run_folder = run_folder
        self._entries_by_folder: dict[Path, tuple[FileEntry, ...]] = {}
        self._is_shared_by_host = self._find_shared_hosts()
        self._job_folders: tuple[JobFolder, ...] = ()

    def stage_job_files(self, folder: Path, kind: StagedKind, resume_from: str | None = None) -> tuple[JobFolder, ...]:
        """Copy what a job needs to every host: `folder` with its plan.json and recipe.toml, and the data.

        A "run" uses runs/NAME on every host, a "job" a temporary folder. Hosts are served in parallel; the folders are
        returned in the members' order. Raises PlaitError where hosts share the working folder and the model to go on
        from lies outside of it: another host reads nothing by a path that is named here.
        """
        if any(self._is_shared_by_host.values()):
            self._name_base_by_shared_path(folder)
        apart = any(self._shared_job_folder(member, folder) is None for member in self._members)
        staged = self._files_to_stage(folder, kind, resume_from) if apart else None
        self._job_folders = _run_on_all_hosts(self._members, lambda member: self._stage_on_host(member, folder, staged))
        return self._job_folders

    def open_run_folder(self) -> None:
        """Have every host that does not share the run's folder get its own ready; raises its PlaitError where it
        cannot, because that folder holds another run for example."""
        recipe = read_regular_text(RunFolder(self._run_folder).recipe, SMALL_FILE_BYTES)
        for member in self._members:
            if not self._is_shared_by_host[member.host]:
                member.ask(OPEN_FOLDER, OpenRequest(kind="run", name=self._run_folder.name, recipe=recipe))

    def send_ahead(self) -> None:
        """Send the run's prepared data, and the model whose weights it begins with, to hosts that need them later;
        call it after `open_run_folder`."""
        if not (apart := [member for member in self._members if not self._is_shared_by_host[member.host]]):
            return
        plan = read_plan(self._run_folder / "plan.json")
        base = self._working.path / plan.job.base if plan.job.base else None
        staged = _StagedFiles(
            kind="run",
            folder=self._run_folder,
            corpus=self._sent((self._working.path / plan.job.corpus).resolve(), "index.json"),
            base=self._sent_base(base) if base and base.is_dir() else None,
            checkpoint=None,
        )
        _run_on_all_hosts(apart, lambda member: (self._send_corpus(member, staged), self._send_base(member, staged)))

    def collect_job_files(self, folder: Path) -> None:
        """Fetch what a job's ranks left in its folder on other hosts, and delete it there; call it after the job.

        Raises PlaitError for a name that leads out of the folder.
        """
        for member, place in zip(self._members, self._job_folders, strict=True):
            if place.is_shared:
                continue
            for name in member.ask(LIST_FILES, Nothing()).values.names:
                target = safe_path(folder, name)
                if not target.exists():
                    fetch_file(member, READ_FILE, ReadRequest(name=name), target)
            member.ask(RELEASE_FOLDER, Nothing())

    def _find_shared_hosts(self) -> dict[int, bool]:
        """Which hosts work in the folder that this one works in: they see what was just written, at the same place."""
        make_private_folder(self._working.cache)
        with ExitStack() as stack:
            nonces = tuple(
                Nonce(folder=str(folder.relative_to(self._working.path)), name=name, content=content)
                for folder in (self._run_folder, self._working.cache)
                for name, content in [stack.enter_context(write_nonce(folder))]
            )
            question = SharedQuestion(nonces=nonces)
            replies = _run_on_all_hosts(self._members, lambda member: member.ask(SEE_FOLDER, question).values)
        found = {member.host: reply.shared for member, reply in zip(self._members, replies, strict=True)}
        shared = [member.name for member in self._members if found[member.host]]
        apart = [member.name for member in self._members if not found[member.host]]
        mount = mount_of(self._run_folder, _MOUNTS.read_text(encoding="utf-8", errors="replace"))
        for line in shared_folder_lines(shared, apart, str(self._run_folder), mount):
            self._log(line)
        return found

    def _shared_job_folder(self, member: JoinedHost, folder: Path) -> JobFolder | None:
        """Where a folder is on a host that shares the run's folder and the cache; None where it is in neither."""
        for top in (self._run_folder, self._working.cache):  # as they are named here: either may be a link elsewhere
            if self._is_shared_by_host[member.host] and folder.resolve().is_relative_to(top.resolve()):
                below = top.relative_to(self._working.path) / folder.resolve().relative_to(top.resolve())
                return JobFolder(path=str(Path(member.host_info.folder) / below), is_shared=True)
        return None

    def _name_base_by_shared_path(self, folder: Path) -> None:
        """Write the path of the model to go on from into the plan as it reads from the working folder, which other
        hosts may have at another place."""
        plan = read_plan(folder / "plan.json")
        base, top = (self._working.path / plan.job.base).resolve(), self._working.path.resolve()
        if not base.is_relative_to(top):
            raise PlaitError(
                f"the hosts share {top}, and the model in {plan.job.base} lies outside of it",
                "copy that folder into the shared one, and name it so in model.from",
            )
        if plan.job.base:
            write_plan(replace(plan, job=replace(plan.job, base=str(base.relative_to(top)))), folder / "plan.json")

    def _files_to_stage(self, folder: Path, kind: StagedKind, resume: str | None) -> _StagedFiles:
        plan = read_plan(folder / "plan.json")
        corpus = (self._working.path / plan.job.corpus).resolve()
        base = self._working.path / plan.job.base if plan.job.base else None
        if resume and base and not base.is_dir():  # the checkpoint has them, and the base's are not needed
            base = None
        checkpoint = folder / "checkpoints" / resume if resume else None
        return _StagedFiles(
            kind=kind,
            folder=folder,
            corpus=self._sent(corpus, "index.json"),
            base=self._sent_base(base) if base else None,
            checkpoint=self._sent(checkpoint, "manifest.json") if checkpoint else None,
        )

    def _sent(self, folder: Path, last: str) -> _Sent:
        if folder not in self._entries_by_folder:
            known: dict[str, str] = {}
            if last == "index.json":  # where the hashes of all large files are written down
                for entry in open_corpus(folder).entries:
                    known |= entry.files
            self._entries_by_folder[folder] = file_entries_of(folder, final_name=last, known_hashes=known)
        return _Sent(path=folder, entries=self._entries_by_folder[folder])

    def _sent_base(self, base: Path) -> _Sent:
        if base not in self._entries_by_folder:
            names = needed_files(read_base_model(base))
            if odd := next((name for name in names if not check_file_name(name)), None):
                raise PlaitError(f"{base / odd} has a name that does not travel to other hosts", "rename it")
            self._entries_by_folder[base] = named_entries(base, names, {})
        return _Sent(path=base, entries=self._entries_by_folder[base])

    def _stage_on_host(self, member: JoinedHost, folder: Path, staged: _StagedFiles | None) -> JobFolder:
        if shared := self._shared_job_folder(member, folder):
            return shared
        assert staged is not None
        try:
            return self._send_staged_files(member, folder, staged)
        except RunFailed:
            raise
        except PlaitError as error:
            raise HostNotServed(error, str(member)) from error

    def _send_staged_files(self, member: JoinedHost, folder: Path, staged: _StagedFiles) -> JobFolder:
        recipe = read_regular_text(RunFolder(folder).recipe, SMALL_FILE_BYTES)
        request = OpenRequest(kind=staged.kind, name=folder.name, recipe=recipe)
        path = member.ask(OPEN_FOLDER, request).values.folder
        corpus, base = self._send_corpus(member, staged), self._send_base(member, staged)
        if sent := staged.checkpoint:
            offer = Offer(root="folder", path=f"checkpoints/{sent.path.name}", files=sent.entries)
            _, nbytes = send_folder(member, sent.path, offer)
            self._log_sent(nbytes, sent.path.name, member)
        plan = read_plan(folder / "plan.json")
        plan = replace(plan, job=replace(plan.job, corpus=corpus, base=base))
        small = {"recipe.toml": recipe.encode(), "plan.json": plan_text(plan).encode()}
        if (routing := folder / ROUTING).exists():  # of a proof: where one process sent a mixture's tokens
            small[ROUTING] = read_regular_file(routing)
        entries = tuple(
            FileEntry(name=name, nbytes=len(content), sha256=sha256(content).hexdigest())
            for name, content in small.items()
        )
        send_offer(member, Offer(root="folder", path="", files=entries), lambda name: BytesIO(small[name]))
        return JobFolder(path=path, is_shared=False)

    def _send_corpus(self, member: JoinedHost, staged: _StagedFiles) -> str:
        """Send the prepared data that another host lacks; returns their path there."""
        folder = staged.corpus.path
        inside = folder.is_relative_to(staged.folder.resolve())
        offer = Offer(root="cache", path=f"data/{folder.name}", files=staged.corpus.entries)
        if inside:  # made for this job alone
            offer = replace(offer, root="folder", path=folder.name)
        path, nbytes = send_folder(member, folder, offer)
        if not inside:
            self._log_sent(nbytes, "prepared data", member)
        return path

    def _send_base(self, member: JoinedHost, staged: _StagedFiles) -> str:
        """Send the weights to begin with that another host lacks, once; returns their path there. What was received is
        found again by its content, whatever the folder is called here."""
        if staged.base is None:
            return ""
        folder, entries = staged.base.path, staged.base.entries
        if self._is_shared_by_host[member.host]:
            return str(folder.resolve().relative_to(self._working.path.resolve()))
        digest = sha256("".join(f"{entry.name} {entry.sha256}\n" for entry in entries).encode())
        offer = Offer(root="cache", path=f"models/{digest.hexdigest()[:32]}", files=entries)
        path, nbytes = send_folder(member, folder, offer)
        self._log_sent(nbytes, "weights to begin with", member)
        return path

    def _log_sent(self, nbytes: int, what: str, member: JoinedHost) -> None:
        if nbytes:
            self._log(f"sent     {format_bytes(nbytes)} of {what} to {member.name}")


def _run_on_all_hosts(members: Sequence[JoinedHost], act: Callable[[JoinedHost], _T]) -> tuple[_T, ...]:
    """Do something with every host at once; raises the first error that comes without waiting for the others."""
    pool = ThreadPoolExecutor(max(1, len(members)), thread_name_prefix="plait stage")
    try:
        futures = [pool.submit(act, member) for member in members]
        for ended in as_completed(futures):
            ended.result()
        return tuple(one.result() for one in futures)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


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
    def handlers(self) -> Handlers:
        """Handlers of the leader's requests."""
        changes: Handlers = {
            SEE_FOLDER: self._check_shared,
            OPEN_FOLDER: self._open,
            OFFER_FILES: self._accept_offer,
            SEND_BLOCK: self._write_block,
            RELEASE_FOLDER: self._release,
        }
        answers: Handlers = {READ_FILE: self._read, LIST_FILES: self._list}
        answers = {**answers, **{request: self._between_jobs(change) for request, change in changes.items()}}
        return {request: self._recording_error(answer) for request, answer in answers.items()}

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
            raise PlaitError(f"the files of a job change while it runs on this host, and {ODD_REQUEST_ADVICE}")
        try:
            yield
        finally:
            self._changes.release()

    def _between_jobs(self, change: _Handler) -> _Handler:
        def guarded(question: Any, blob: bytes) -> Reply[Any]:
            with self._changing():
                return change(question, blob)

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

    def _recording_error(self, answer: _Handler) -> _Handler:
        def recorded(question: Any, blob: bytes) -> Reply[Any]:
            try:
                return answer(question, blob)
            except PlaitError as error:
                self.local_error = error
                raise
            except OSError as error:
                self.local_error = PlaitError(
                    f"this host cannot use {error.filename or self._working_folder} ({error.strerror})",
                    "fix that, then join again",
                )
                raise self.local_error from error

        return recorded

    def _check_shared(self, asked: SharedQuestion, blob: bytes) -> Reply[SharedReply]:
        """Whether the leader's working folder is this one: each nonce lies at its place below it."""
        found = [has_nonce(self._working_folder / one.folder, one.name, one.content) for one in asked.nonces]
        before, self._shares_leader_folder = self._shares_leader_folder, bool(found) and all(found)
        place = "shared with it" if self._shares_leader_folder else "not shared: what this host needs is sent"
        if before != self._shares_leader_folder or self._folder is None:  # asked at each start, printed once
            self._log(f"folder   {self._working_folder} is {place}")
        return Reply(values=SharedReply(shared=self._shares_leader_folder))

    def _open(self, request: OpenRequest, blob: bytes) -> Reply[FolderReply]:
        """Make this host's folder for a run, which stays, or for a single job."""
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
        return Reply(values=FolderReply(folder=str(self._folder)))

    def _open_run(self, request: OpenRequest) -> Path:
        """The folder of the one run that this host joined."""
        path = self._working_folder / "runs" / request.name
        if self._run is None:
            self._locks.enter_context(lock_run_folder(RunFolder(path)))
            self._run = JoinedRun(path, request.recipe)
            self._log(f"run      {path}, recipe {self._run.recipe_digest[:12]}")
        elif path != self._run.path:
            raise PlaitError(f"the host that leads named a second run, {request.name!r}", "join again")
        return path

    def _accept_offer(self, offer: Offer, blob: bytes) -> Reply[OfferReply]:
        """Find which of the offered files are lacking here, and be ready for them."""
        in_cache = offer.root == "cache"
        root = self._working_folder / ".plait" if in_cache else self._current_folder
        # Apart from what this host itself prepared: what another host sends must never replace a person's own data.
        received = "received" if in_cache and not self._shares_leader_folder else ""
        folder = root / received / offer.path
        refuse_links(root, folder)
        if offer.checkpoint and self._run is not None and root == self._run.path:
            self._run.make_room_for(offer.checkpoint)
        self._folders.forget(folder)
        self._incoming = IncomingFolder(folder, offer.files)
        self._folders.admit(self._incoming)
        self._logs_arrival = in_cache or bool(offer.checkpoint and self._in_run_folder)
        if not self._incoming.missing and in_cache and folder not in self._received:
            self._log(f"{offer.content:8} {folder}, here already")
        return Reply(values=OfferReply(folder=str(folder), lacking=self._incoming.missing))

    def _write_block(self, header: BlockHeader, blob: bytes) -> Reply[Nothing]:
        """The next bytes of a file that was offered."""
        if self._incoming is None:
            raise PlaitError("the host that leads sent a piece of no file", "give the same command again")
        self._incoming.write_block(header.name, header.offset, blob)
        self._folders.admit(self._incoming)
        if self._incoming.is_complete and self._logs_arrival:
            self._received.add(self._incoming.folder)
            self._log(f"received {self._incoming.folder}")
        return DONE

    def _read(self, asked: ReadRequest, blob: bytes) -> Reply[ReadReply]:
        """Some bytes of a file in the current folder; those of a checkpoint lie in its staging folder."""
        folder = self._current_folder
        if asked.staging is not None:
            folder = folder / "checkpoints" / asked.staging
            refuse_links(self._current_folder, folder)
        size, data = read_block(folder, asked.name, asked.offset, asked.bytes)
        return Reply(values=ReadReply(size=size), blob=data)

    def _list(self, _: Nothing, blob: bytes) -> Reply[NamesReply]:
        """The names of the files in the current folder."""
        names = sorted(path.name for path in self._current_folder.iterdir() if path.is_file())
        return Reply(values=NamesReply(names=tuple(names)))

    def _release(self, _: Nothing, blob: bytes) -> Reply[Nothing]:
        """Take away the folder of a single job."""
        self._remove_job_folder()
        return DONE

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
            raise PlaitError("the host that leads named no folder first", "give the same command again")
        return self._folder


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArgument:
    """The path of the folder that a job is about, and the name of a checkpoint in it or None."""

    folder: str
    resume: str | None = None


def read_job_argument(argument: str) -> JobArgument:
    """The argument is the folder's path itself, or a JSON object that holds it; raises PlaitError for anything else."""
    try:
        values = json.loads(argument) if argument.startswith("{") else {"folder": argument}
        found = JobArgument(folder=values["folder"], resume=values.get("resume"))
    except (ValueError, KeyError, RecursionError):
        found = None
    if found is None or not isinstance(found.folder, str) or not isinstance(found.resume, str | None):
        raise PlaitError("a job names no folder", "install the same commit of plait on all hosts")
    return found


def check_job(job: Job, may_use: Callable[[Path], bool]) -> None:
    """Raise PlaitError for a job that would read or write outside of the folders that it may use."""
    if job.entry in (MEASURE_ENTRY, PROBE_ENTRY, PRODUCTS_ENTRY, MACHINE_CHECK_ENTRY):  # without files
        if job.log_dir is not None:
            raise PlaitError(f"{job.entry} has no logs, and {ODD_REQUEST_ADVICE}")
        return
    asked = read_job_argument(job.argument)
    if asked.resume is not None and not CHECKPOINT_NAME.fullmatch(asked.resume):
        raise PlaitError(f"{asked.resume[:80]!r} is not a checkpoint, and {ODD_REQUEST_ADVICE}")
    if job.log_dir not in (None, asked.folder, f"{asked.folder}/logs") or not may_use(Path(asked.folder)):
        raise PlaitError(f"{asked.folder[:200]} is not a folder of this run on this host, and {ODD_REQUEST_ADVICE}")


class ReceivedFolders:
    """Prepared data and models that host 0 has itself: all their files were offered to this host, and are here as it
    has them."""

    def __init__(self) -> None:
        self._corpora, self._models = set[Path](), set[Path]()

    def forget(self, folder: Path) -> None:
        """Files are about to be offered for a folder: until they are here it is not to be used."""
        self._corpora.discard(folder)
        self._models.discard(folder)

    def admit(self, incoming: IncomingFolder) -> None:
        """Let jobs use what was offered as soon as it is complete. Raises PlaitError where its index, or its config,
        names files that were not offered: host 0 may not know them, as those of another run on this host."""
        if not incoming.is_complete:
            return
        if "index.json" in incoming.hashes:
            for entry in open_corpus(incoming.folder).entries:
                if not entry.files.items() <= incoming.hashes.items():
                    raise PlaitError(f"the data offered lack files of {entry.name}, and {ODD_REQUEST_ADVICE}")
            self._corpora.add(incoming.folder)
        elif CONFIG in incoming.hashes:
            if not set(needed_files(read_base_model(incoming.folder))) <= incoming.hashes.keys():
                raise PlaitError(f"the model offered lacks files of its own, and {ODD_REQUEST_ADVICE}")
            self._models.add(incoming.folder)

    def allow(self, plan: Plan) -> bool:
        """Whether the data and the model of a plan are among what was received."""
        return Path(plan.job.corpus) in self._corpora and (not plan.job.base or Path(plan.job.base) in self._models)


def own_part(job: Job, ranks: int, threads: int) -> HostPart:
    """Host 0's own part of a job: the job as it is, on its own ranks."""
    return HostPart(ranks=ranks, threads=threads, argument=job.argument, log_dir=job.log_dir)


def joined_host_part(job: Job, share: HostShare, job_folder: JobFolder) -> HostPart:
    """A joined host's part of a job: the same argument, with the folder that this host has for it."""
    argument, training = job_folder.path, job.entry == TRAINING_ENTRY
    if job.argument.startswith("{"):
        sent = {"parts": "sent"} if training and not job_folder.is_shared else {}
        argument = json.dumps({**json.loads(job.argument), "folder": job_folder.path, **sent})
    log_dir = f"{job_folder.path}/logs" if training else job_folder.path
    return HostPart(ranks=share.workers, threads=share.threads, argument=argument, log_dir=log_dir)


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
            f"{folder.path} was sent here by a host that leads this run (plait join)",
            "go on with it there, or choose another run.name",
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
                f"{folder.path} on this host holds a run of its own", "move it away, or join from another folder"
            )
        return
    if not folder.has_begun:
        return
    try:
        check_changes(read_saved_recipe(folder.recipe), parse_recipe(recipe, "the recipe that host 0 sent"))
    except PlaitError as error:
        raise PlaitError(
            f"{folder.path} on this host is of another recipe ({error.cause})", "move it away, then join again"
        ) from None


def _holds_own_files(folder: Path) -> bool:
    """Whether a run's folder has more in it than its lock, logs and empty folders."""
    held = [path for path in folder.iterdir() if path.name not in (".lock", "logs")]
    return any(path.is_symlink() or not path.is_dir() or any(path.iterdir()) for path in held)
