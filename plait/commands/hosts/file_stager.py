"""Sends each joined host what a job needs there, once: recipe, plan, prepared data, the checkpoint to go on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from plait.commands.hosts.file_transfer import FileFact, Peer, facts_of, fetch_file, safe_path, send_folder
from plait.commands.hosts.shared_folder import nonce
from plait.commands.planning.make_plan import Log
from plait.commands.planning.run_folder import RunFolder
from plait.commands.preparing.corpus import CACHE
from plait.data.shards import open_corpus
from plait.planner.plan_file import plan_text, read_plan
from plait.units import format_bytes

_T = TypeVar("_T")
StagedKind = Literal["run", "job"]


class JoinedHost(Peer, Protocol):
    """A host that joined: launch.leader.Member, or a test's own."""

    @property
    def host(self) -> int: ...
    @property
    def hello(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingFolder:
    """Where a job's folder is on another host, and whether it is the same folder as on host 0."""

    path: str
    shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What is to be on every host without the folder before a job can begin."""

    kind: StagedKind
    folder: Path
    corpus: Path
    corpus_facts: tuple[FileFact, ...]
    checkpoint: Path | None
    checkpoint_facts: tuple[FileFact, ...]


class FileStager:
    """The way of files between host 0, whose working folder is the current one, and the hosts that joined it."""

    def __init__(self, members: Sequence[JoinedHost], run: Path, say: Log) -> None:
        self._members, self._say = members, say
        self._run = run
        self._hashed: dict[Path, tuple[FileFact, ...]] = {}
        self._shared = self._look()
        self._places: tuple[StagingFolder, ...] = ()

    def deliver(self, folder: Path, kind: StagedKind, resume: str | None = None) -> tuple[StagingFolder, ...]:
        """Have what a job over all hosts needs on each: `folder` with its plan.json and recipe.toml, and the data.

        A "run" has its folder runs/NAME on every host, a "job" one for its time alone. Hosts are served side by side;
        the places are in the members' order.
        """
        apart = any(self._shared_place(member, folder) is None for member in self._members)
        load = self._load(folder, kind, resume) if apart else None
        self._places = _on_all(self._members, lambda member: self._serve(member, folder, load))
        return self._places

    def bring_back(self, folder: Path) -> None:
        """After a job: bring here what its ranks left in its folder on other hosts, and have that taken away there.

        Raises PlaitError for a name that leads out of the folder.
        """
        for member, place in zip(self._members, self._places, strict=True):
            if place.shared:
                continue
            for name in member.ask("list", {}).values["names"]:
                target = safe_path(folder, name)
                if not target.exists():
                    fetch_file(member, {"name": name}, target)
            member.ask("release", {})

    def _look(self) -> dict[int, bool]:
        """Which hosts work in the folder that this one works in: they see what was just written, at the same place."""
        CACHE.mkdir(exist_ok=True)
        with ExitStack() as stack:
            nonces = [
                {"folder": str(folder), "name": name, "content": content}
                for folder in (self._run, CACHE)
                for name, content in [stack.enter_context(nonce(folder))]
            ]
            seen = [member.ask("see", {"nonces": nonces}).values["shared"] for member in self._members]
        return {member.host: shared for member, shared in zip(self._members, seen, strict=True)}

    def _shared_place(self, member: JoinedHost, folder: Path) -> StagingFolder | None:
        """Where a folder is on a host that shares the run's folder and the cache; None where it is in neither."""
        for top in (self._run, CACHE):  # as they are named here: either may be a link to another disk
            if self._shared[member.host] and folder.resolve().is_relative_to(top.resolve()):
                below = top / folder.resolve().relative_to(top.resolve())
                return StagingFolder(path=str(Path(member.hello["folder"]) / below), shared=True)
        return None

    def _load(self, folder: Path, kind: StagedKind, resume: str | None) -> _Load:
        corpus = Path(read_plan(folder / "plan.json").corpus).resolve()
        checkpoint = folder / "checkpoints" / resume if resume else None
        return _Load(
            kind=kind,
            folder=folder,
            corpus=corpus,
            corpus_facts=self._facts(corpus, "index.json"),
            checkpoint=checkpoint,
            checkpoint_facts=self._facts(checkpoint, "manifest.json") if checkpoint else (),
        )

    def _facts(self, folder: Path, last: str) -> tuple[FileFact, ...]:
        if folder not in self._hashed:
            known: dict[str, str] = {}
            if last == "index.json":  # where the hashes of all large files are written down
                for entry in open_corpus(folder).entries:
                    known |= entry.files
            self._hashed[folder] = facts_of(folder, last=last, known=known)
        return self._hashed[folder]

    def _serve(self, member: JoinedHost, folder: Path, load: _Load | None) -> StagingFolder:
        if shared := self._shared_place(member, folder):
            return shared
        assert load is not None
        recipe = RunFolder(folder).recipe.read_text(encoding="utf-8")
        asked = {"kind": load.kind, "name": folder.name, "recipe": recipe}
        path = member.ask("open", asked).values["folder"]
        corpus = self._send_corpus(member, load)
        if load.checkpoint:
            place = {"root": "folder", "path": f"checkpoints/{load.checkpoint.name}"}
            _, sent = send_folder(member, load.checkpoint, load.checkpoint_facts, place)
            self._tell(sent, load.checkpoint.name, member)
        plan = replace(read_plan(folder / "plan.json"), corpus=corpus)
        member.ask("put", {"name": "recipe.toml"}, recipe.encode())
        member.ask("put", {"name": "plan.json"}, plan_text(plan).encode())
        return StagingFolder(path=path, shared=False)

    def _send_corpus(self, member: JoinedHost, load: _Load) -> str:
        """Where the prepared data lie on another host, once they are all there."""
        inside = load.corpus.is_relative_to(load.folder.resolve())
        place = {"root": "cache", "path": f"data/{load.corpus.name}"}
        if inside:  # made for this job alone
            place = {"root": "folder", "path": load.corpus.name}
        path, sent = send_folder(member, load.corpus, load.corpus_facts, place)
        if not inside:
            self._tell(sent, "prepared data", member)
        return path

    def _tell(self, nbytes: int, what: str, member: JoinedHost) -> None:
        if nbytes:
            self._say(f"sent     {format_bytes(nbytes)} of {what} to {member.name}")


def _on_all(members: Sequence[JoinedHost], act: Callable[[JoinedHost], _T]) -> tuple[_T, ...]:
    """Do something with every host at once; raises the first error that comes without waiting for the others."""
    pool = ThreadPoolExecutor(len(members), thread_name_prefix="freight")
    try:
        asked = [pool.submit(act, member) for member in members]
        for ended in as_completed(asked):
            ended.result()
        return tuple(one.result() for one in asked)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
