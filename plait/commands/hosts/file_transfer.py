"""Files that travel between the hosts of a run: which are lacking, block by block, whole at the end or not there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from plait.checkpoint.arrival import aside
from plait.data.shards import file_sha256
from plait.errors import PlaitError
from plait.units import format_bytes

TRANSFER_BLOCK_BYTES = 1 << 20
"""Small enough that a slow link carries one between two heartbeats, and never a whole file in memory."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DEPTH = 3


class FileAnswer(Protocol):
    """What another host replies: JSON values and bytes."""

    @property
    def values(self) -> Mapping[str, Any]: ...
    @property
    def blob(self) -> bytes: ...


class Peer(Protocol):
    """Another host that can be asked; blocks until it has replied."""

    @property
    def name(self) -> str: ...
    def ask(self, kind: str, values: Mapping[str, Any], blob: bytes = b"") -> FileAnswer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFact:
    """A file as it should be on the other host; `name` is its path below the folder that travels."""

    name: str
    nbytes: int
    sha256: str


def facts_of(folder: Path, *, last: str, known: Mapping[str, str] | None = None) -> tuple[FileFact, ...]:
    """The files of a flat folder, `last` at the end: the one that says that the folder is whole.

    `known` are SHA-256 of files that need not be read for it.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and _NAME.fullmatch(path.name))
    assert last in names, f"{folder} has no {last}"
    ordered = [name for name in names if name != last] + [last]
    hashes = known or {}
    return tuple(
        FileFact(
            name=name, nbytes=(folder / name).stat().st_size, sha256=hashes.get(name) or file_sha256(folder / name)
        )
        for name in ordered
    )


def send_folder(peer: Peer, folder: Path, facts: Sequence[FileFact], place: Mapping[str, str]) -> tuple[str, int]:
    """Send what the other host lacks of a folder; answers where it lies there, and how many bytes travelled.

    `place` is what the other host's `Depot.take` understands. Cut off half-way, the next call goes on after the last
    whole file.
    """
    offer = {**place, "files": [asdict(fact) for fact in facts]}
    found = peer.ask("take", offer).values
    sizes = {fact.name: fact.nbytes for fact in facts}
    for name in found["lacking"]:
        for offset, block in _blocks(folder / name, sizes[name]):
            peer.ask("block", {"name": name, "offset": offset}, block)
    return found["folder"], sum(sizes[name] for name in found["lacking"])


def fetch_file(
    peer: Peer, place: Mapping[str, str], target: Path, *, unwanted: Callable[[], bool] = lambda: False
) -> None:
    """Bring a file of the other host's here; it appears as `target` when all of it is on the disk.

    `place` is its "name" in that host's current folder, with "staging" where it is of a checkpoint. `unwanted` is asked
    before each block; raises PlaitError as soon as it says yes.
    """
    part = target.with_name(aside(target.name))
    with part.open("wb") as file:
        size = None
        while size is None or file.tell() < size:
            if unwanted():
                raise PlaitError(f"nobody waits for {target.name} any more; give the same command again")
            answer = peer.ask("read", {**place, "offset": file.tell(), "bytes": TRANSFER_BLOCK_BYTES})
            size = answer.values["size"]
            if not answer.blob and file.tell() < size:
                raise PlaitError(f"{peer.name} sent less of {target.name} than it has; give the same command again")
            file.write(answer.blob)
        file.flush()
        os.fsync(file.fileno())
    part.rename(target)


def read_block(folder: Path, name: str, offset: int, nbytes: int) -> tuple[int, bytes]:
    """A file's size and some of its bytes, for a host that fetches it; raises PlaitError for a name that leads out."""
    with safe_path(folder, name).open("rb") as file:
        file.seek(offset)
        return os.fstat(file.fileno()).st_size, file.read(min(nbytes, TRANSFER_BLOCK_BYTES))


def safe_path(folder: Path, name: str) -> Path:
    """A path below a folder, from words of another host; raises PlaitError unless they are plain names."""
    parts = name.split("/")
    if len(parts) > _DEPTH or not all(_NAME.fullmatch(part) for part in parts):
        raise PlaitError(f"another host named the file {name[:80]!r}, which plait never does; is it one of yours?")
    return folder.joinpath(*parts)


class IncomingFile:
    """Takes the files that another host sends into one folder; those already there as they should be are not lacking.

    Raises PlaitError, before anything is written, where they do not fit on the disk.
    """

    def __init__(self, folder: Path, facts: Iterable[FileFact]) -> None:
        self.folder = folder
        self._wanted = {fact.name: fact for fact in facts}
        self.lacking = tuple(fact.name for fact in self._wanted.values() if not _is_there(folder, fact))
        self._left = set(self.lacking)
        self._digest = sha256()
        self._part: Path | None = None
        _make_room(folder, sum(self._wanted[name].nbytes for name in self.lacking))

    @property
    def complete(self) -> bool:
        """Whether all that was lacking is here."""
        return not self._left

    def abandon(self) -> None:
        """Take away what came of a file whose rest will not come."""
        if self._part is not None:
            with suppress(OSError):
                self._part.unlink()

    def block(self, name: str, offset: int, data: bytes) -> None:
        """The next bytes of a file; with its last ones it is checked and appears under its name."""
        if name not in self.lacking:
            raise PlaitError(f"another host sent {name[:80]!r}, which nobody asked for; give the same command again")
        path, fact = safe_path(self.folder, name), self._wanted[name]
        self._part = part = path.with_name(aside(path.name))
        with disk_error(part):
            _write_at(part, offset, data)
            self._digest = self._digest if offset else sha256()
            self._digest.update(data)
            if offset + len(data) == fact.nbytes:
                _finish(part, path, whole=self._digest.hexdigest() == fact.sha256)
                self._left.discard(name)


def facts_from(rows: Iterable[Mapping[str, Any]]) -> tuple[FileFact, ...]:
    """The inverse of `dataclasses.asdict` on what another host offers."""
    return tuple(FileFact(**row) for row in rows)


@contextmanager
def disk_error(path: Path) -> Iterator[None]:
    """Around what writes a file from another host: a disk that says no ends in a sentence, and the file is gone."""
    try:
        yield
    except (OSError, PlaitError) as error:
        with suppress(OSError):  # what cannot be taken away is told of all the same
            path.unlink()
        if isinstance(error, PlaitError):
            raise
        raise PlaitError(
            f"this host cannot write {path.parent} ({error.strerror}); free some space or mend its rights, "
            "then join again"
        ) from error


def _is_there(folder: Path, fact: FileFact) -> bool:
    path = safe_path(folder, fact.name)
    try:
        return path.stat().st_size == fact.nbytes and file_sha256(path) == fact.sha256
    except OSError:
        return False


def _blocks(path: Path, nbytes: int) -> Iterator[tuple[int, bytes]]:
    """A file piece by piece; one that has changed since its facts were taken would be refused at its end."""
    with path.open("rb") as file:
        offset = 0
        while offset < nbytes or offset == 0:
            data = file.read(min(TRANSFER_BLOCK_BYTES, nbytes - offset))
            yield offset, data
            offset += len(data)
            if not data:
                return


def _make_room(folder: Path, nbytes: int) -> None:
    with disk_error(folder / aside("room")):
        folder.mkdir(parents=True, exist_ok=True)
        disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < nbytes:
        raise PlaitError(
            f"the run's files need {format_bytes(nbytes)} in {folder} on this host, where {format_bytes(free)} are "
            "free; free some space, then join again"
        )


def _write_at(part: Path, offset: int, data: bytes) -> None:
    with part.open("r+b" if offset else "wb") as file:
        if file.seek(0, os.SEEK_END) != offset:
            raise PlaitError(f"a piece of {part.name} is missing; give the same command again")
        file.write(data)


def _finish(part: Path, path: Path, *, whole: bool) -> None:
    if not whole:
        raise PlaitError(
            f"{path.name} did not arrive as it was sent; did it change meanwhile? give the same command again"
        )
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.rename(path)
