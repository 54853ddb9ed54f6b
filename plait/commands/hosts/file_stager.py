"""Sends each joined host what a job needs there, once: recipe, plan, prepared data, weights to begin with, the
checkpoint to go on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar

from plait.commands.hosts.file_names import TRANSFER_BLOCK_BYTES, check_file_name, safe_path
from plait.commands.hosts.file_transfer import FileEntry, fetch_file, file_entries_of, named_entries, send_folder
from plait.commands.hosts.replies import FolderReply, NamesReply, Peer, SharedReply, parse_reply
from plait.commands.hosts.requests import StagedKind
from plait.commands.hosts.shared_folder import mount_of, shared_folder_lines, write_nonce
from plait.commands.planning.make_plan import Log
from plait.commands.planning.run_folder import RunFolder
from plait.data.shards import open_corpus
from plait.errors import PlaitError, RunFailed
from plait.interop.base_model import needed_files, read_base_model
from plait.launch.values.failed_job import HostNotServed
from plait.planner.plan_file import plan_text, read_plan, write_plan
from plait.private_folder import make_private_folder
from plait.regular_file import SMALL_FILE_BYTES, read_regular_file, read_regular_text
from plait.units import format_bytes
from plait.workers import ROUTING
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

_T = TypeVar("_T")
_MOUNTS = Path("/proc/self/mountinfo")


class JoinedHost(Peer, Protocol):
    """A joined host: launch.remote.leader.Member, or a test's own."""

    @property
    def host(self) -> int: ...
    @property
    def host_info(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFolder:
    """Where a job's folder is on another host, and whether it is the same folder as on host 0."""

    path: str
    is_shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagedFiles:
    """The files that a host needs before a job can begin, unless it shares the job's folder with host 0."""

    kind: StagedKind
    folder: Path
    corpus: Path
    corpus_entries: tuple[FileEntry, ...]
    base: Path | None
    """The folder of the model whose weights a job begins with; None where it draws them."""
    base_entries: tuple[FileEntry, ...]
    checkpoint: Path | None
    checkpoint_entries: tuple[FileEntry, ...]


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
                member.ask("open", {"kind": "run", "name": self._run_folder.name, "recipe": recipe})

    def collect_job_files(self, folder: Path) -> None:
        """Fetch what a job's ranks left in its folder on other hosts, and delete it there; call it after the job.

        Raises PlaitError for a name that leads out of the folder.
        """
        for member, place in zip(self._members, self._job_folders, strict=True):
            if place.is_shared:
                continue
            for name in parse_reply(NamesReply, member, member.ask("list", {})).names:
                target = safe_path(folder, name)
                if not target.exists():
                    fetch_file(member, {"name": name}, target)
            member.ask("release", {})

    def _find_shared_hosts(self) -> dict[int, bool]:
        """Which hosts work in the folder that this one works in: they see what was just written, at the same place."""
        make_private_folder(self._working.cache)
        with ExitStack() as stack:
            nonces = [
                {"folder": str(folder.relative_to(self._working.path)), "name": name, "content": content}
                for folder in (self._run_folder, self._working.cache)
                for name, content in [stack.enter_context(write_nonce(folder))]
            ]
            replies = _run_on_all_hosts(
                self._members, lambda member: parse_reply(SharedReply, member, member.ask("see", {"nonces": nonces}))
            )
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
                return JobFolder(path=str(Path(member.host_info["folder"]) / below), is_shared=True)
        return None

    def _name_base_by_shared_path(self, folder: Path) -> None:
        """Write the path of the model to go on from into the plan as it reads from the working folder, which other
        hosts may have at another place."""
        plan = read_plan(folder / "plan.json")
        base, top = (self._working.path / plan.job.base).resolve(), self._working.path.resolve()
        if not base.is_relative_to(top):
            raise PlaitError(
                f"the hosts share {top}, and the model in {plan.job.base} lies outside of it; copy that folder into "
                "the shared one, and name it so in model.from"
            )
        if plan.job.base:
            write_plan(replace(plan, job=replace(plan.job, base=str(base.relative_to(top)))), folder / "plan.json")

    def _files_to_stage(self, folder: Path, kind: StagedKind, resume: str | None) -> _StagedFiles:
        plan = read_plan(folder / "plan.json")
        corpus = (self._working.path / plan.job.corpus).resolve()
        base = self._working.path / plan.job.base if plan.job.base else None
        if resume and base and not base.is_dir():  # the checkpoint has them, and nobody misses those of the base
            base = None
        checkpoint = folder / "checkpoints" / resume if resume else None
        return _StagedFiles(
            kind=kind,
            folder=folder,
            corpus=corpus,
            corpus_entries=self._file_entries(corpus, "index.json"),
            base=base,
            base_entries=self._base_entries(base) if base else (),
            checkpoint=checkpoint,
            checkpoint_entries=self._file_entries(checkpoint, "manifest.json") if checkpoint else (),
        )

    def _file_entries(self, folder: Path, last: str) -> tuple[FileEntry, ...]:
        if folder not in self._entries_by_folder:
            known: dict[str, str] = {}
            if last == "index.json":  # where the hashes of all large files are written down
                for entry in open_corpus(folder).entries:
                    known |= entry.files
            self._entries_by_folder[folder] = file_entries_of(folder, final_name=last, known_hashes=known)
        return self._entries_by_folder[folder]

    def _base_entries(self, base: Path) -> tuple[FileEntry, ...]:
        if base not in self._entries_by_folder:
            names = needed_files(read_base_model(base))
            if odd := next((name for name in names if not check_file_name(name)), None):
                raise PlaitError(f"{base / odd} has a name that does not travel to other hosts; rename it")
            self._entries_by_folder[base] = named_entries(base, names, {})
        return self._entries_by_folder[base]

    def _stage_on_host(self, member: JoinedHost, folder: Path, staged: _StagedFiles | None) -> JobFolder:
        if shared := self._shared_job_folder(member, folder):
            return shared
        assert staged is not None
        try:
            return self._send_staged_files(member, folder, staged)
        except RunFailed:
            raise
        except PlaitError as error:
            raise HostNotServed(str(error), str(member)) from error

    def _send_staged_files(self, member: JoinedHost, folder: Path, staged: _StagedFiles) -> JobFolder:
        recipe = read_regular_text(RunFolder(folder).recipe, SMALL_FILE_BYTES)
        request = {"kind": staged.kind, "name": folder.name, "recipe": recipe}
        path = parse_reply(FolderReply, member, member.ask("open", request)).folder
        corpus, base = self._send_corpus(member, staged), self._send_base(member, staged)
        if staged.checkpoint:
            place = {"root": "folder", "path": f"checkpoints/{staged.checkpoint.name}"}
            _, sent = send_folder(member, staged.checkpoint, staged.checkpoint_entries, place)
            self._log_sent(sent, staged.checkpoint.name, member)
        plan = read_plan(folder / "plan.json")
        plan = replace(plan, job=replace(plan.job, corpus=corpus, base=base))
        small = {"recipe.toml": recipe.encode(), "plan.json": plan_text(plan).encode()}
        if (routing := folder / ROUTING).exists():  # of a proof: where one process sent a mixture's tokens
            small[ROUTING] = read_regular_file(routing)
        for name, content in small.items():
            for offset in range(0, max(1, len(content)), TRANSFER_BLOCK_BYTES):
                header = {"name": name, "offset": offset, "nbytes": len(content)}
                member.ask("put", header, content[offset : offset + TRANSFER_BLOCK_BYTES])
        return JobFolder(path=path, is_shared=False)

    def _send_corpus(self, member: JoinedHost, staged: _StagedFiles) -> str:
        """Send the prepared data that another host lacks; returns their path there."""
        inside = staged.corpus.is_relative_to(staged.folder.resolve())
        place = {"root": "cache", "path": f"data/{staged.corpus.name}"}
        if inside:  # made for this job alone
            place = {"root": "folder", "path": staged.corpus.name}
        path, sent = send_folder(member, staged.corpus, staged.corpus_entries, place)
        if not inside:
            self._log_sent(sent, "prepared data", member)
        return path

    def _send_base(self, member: JoinedHost, staged: _StagedFiles) -> str:
        """Send the weights to begin with that another host lacks, once; returns their path there. What was received is
        found again by its content, whatever the folder is called here."""
        if staged.base is None:
            return ""
        if self._is_shared_by_host[member.host]:
            return str(staged.base.resolve().relative_to(self._working.path.resolve()))
        digest = sha256("".join(f"{entry.name} {entry.sha256}\n" for entry in staged.base_entries).encode())
        place = {"root": "cache", "path": f"models/{digest.hexdigest()[:32]}"}
        path, sent = send_folder(member, staged.base, staged.base_entries, place)
        self._log_sent(sent, "weights to begin with", member)
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
