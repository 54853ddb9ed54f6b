"""Copies files between the hosts of a run in blocks; a file gets its name only when it is complete."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from plait.checkpoint.arrival import partial_name
from plait.data.shards import file_sha256
from plait.errors import PlaitError
from plait.units import format_bytes

TRANSFER_BLOCK_BYTES = 1 << 20
"""Small enough that a slow link carries a block between two heartbeats."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MAX_PATH_DEPTH = 3


class PeerReply(Protocol):
    """What another host replies: JSON values and bytes."""

    @property
    def values(self) -> Mapping[str, Any]: ...
    @property
    def blob(self) -> bytes: ...


class Peer(Protocol):
    """Another host that answers requests; `ask` blocks until it has replied."""

    @property
    def name(self) -> str: ...
    def ask(self, kind: str, values: Mapping[str, Any], blob: bytes = b"") -> PeerReply: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file as it should be on the other host; `name` is its path below the folder that travels."""

    name: str
    nbytes: int
    sha256: str


def file_entries_of(
    folder: Path, *, final_name: str, known_hashes: Mapping[str, str] | None = None
) -> tuple[FileEntry, ...]:
    """The files of a flat folder, `final_name` at the end: the one whose presence says that the folder is complete.

    `known_hashes` are SHA-256 of files that need not be read for it.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and _FILE_NAME.fullmatch(path.name))
    assert final_name in names, f"{folder} has no {final_name}"
    ordered = [name for name in names if name != final_name] + [final_name]
    hashes = known_hashes or {}
    return tuple(
        FileEntry(
            name=name, nbytes=(folder / name).stat().st_size, sha256=hashes.get(name) or file_sha256(folder / name)
        )
        for name in ordered
    )


def send_folder(
    peer: Peer, folder: Path, entries: Sequence[FileEntry], destination: Mapping[str, str]
) -> tuple[str, int]:
    """Send the files of a folder that the other host lacks; returns the folder's path there, and how many bytes
    travelled.

    `destination` is what the other host's "take" handler understands. If it is cut off half-way, the next call
    continues after the last complete file.
    """
    offer = {**destination, "files": [asdict(fact) for fact in entries]}
    found = peer.ask("take", offer).values
    sizes = {fact.name: fact.nbytes for fact in entries}
    for name in found["lacking"]:
        for offset, block in _blocks(folder / name, sizes[name]):
            peer.ask("block", {"name": name, "offset": offset}, block)
    return found["folder"], sum(sizes[name] for name in found["lacking"])


def fetch_file(
    peer: Peer, source: Mapping[str, str], target: Path, *, is_cancelled: Callable[[], bool] = lambda: False
) -> None:
    """Copy a file from the other host; it appears as `target` only when all of it is on the disk.

    `source` holds its "name" in that host's current folder, and "staging" if it belongs to a checkpoint. `is_cancelled`
    is called before each block; raises PlaitError as soon as it returns True.
    """
    part = target.with_name(partial_name(target.name))
    with part.open("wb") as file:
        size = None
        while size is None or file.tell() < size:
            if is_cancelled():
                raise PlaitError(f"nobody waits for {target.name} any more; give the same command again")
            answer = peer.ask("read", {**source, "offset": file.tell(), "bytes": TRANSFER_BLOCK_BYTES})
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
    """The path below `folder` that another host named; raises PlaitError unless it consists of plain names."""
    parts = name.split("/")
    if len(parts) > _MAX_PATH_DEPTH or not all(_FILE_NAME.fullmatch(part) for part in parts):
        raise PlaitError(f"another host named the file {name[:80]!r}, which plait never does; is it one of yours?")
    return folder.joinpath(*parts)


class IncomingFolder:
    """Receives the files that another host sends into one folder; those that are already there need not be sent.

    Raises PlaitError, before anything is written, where they do not fit on the disk.
    """

    def __init__(self, folder: Path, entries: Iterable[FileEntry]) -> None:
        self.folder = folder
        self._expected = {fact.name: fact for fact in entries}
        self.missing = tuple(fact.name for fact in self._expected.values() if not _has_file(folder, fact))
        self._still_missing = set(self.missing)
        self._digest = sha256()
        self._partial_path: Path | None = None
        _check_free_space(folder, sum(self._expected[name].nbytes for name in self.missing))

    @property
    def is_complete(self) -> bool:
        """Whether all missing files have arrived."""
        return not self._still_missing

    def discard_partial_file(self) -> None:
        """Delete the beginning of a file whose rest will not arrive."""
        if self._partial_path is not None:
            with suppress(OSError):
                self._partial_path.unlink()

    def write_block(self, name: str, offset: int, data: bytes) -> None:
        """Append the next bytes of a file; after the last ones its hash is checked and it gets its name."""
        if name not in self.missing:
            raise PlaitError(f"another host sent {name[:80]!r}, which nobody asked for; give the same command again")
        path, fact = safe_path(self.folder, name), self._expected[name]
        self._partial_path = part = path.with_name(partial_name(path.name))
        with convert_disk_errors(part):
            _write_at(part, offset, data)
            self._digest = self._digest if offset else sha256()
            self._digest.update(data)
            if offset + len(data) == fact.nbytes:
                _verify_and_rename(part, path, whole=self._digest.hexdigest() == fact.sha256)
                self._still_missing.discard(name)


def file_entries_from(rows: Iterable[Mapping[str, Any]]) -> tuple[FileEntry, ...]:
    """The file entries that another host offers; the inverse of `dataclasses.asdict`."""
    return tuple(FileEntry(**row) for row in rows)


@contextmanager
def convert_disk_errors(path: Path) -> Iterator[None]:
    """Context for writing a file from another host: an OSError deletes the file and becomes a PlaitError."""
    try:
        yield
    except (OSError, PlaitError) as error:
        with suppress(OSError):  # the error is reported even if the file cannot be deleted
            path.unlink()
        if isinstance(error, PlaitError):
            raise
        raise PlaitError(
            f"this host cannot write {path.parent} ({error.strerror}); free some space or mend its rights, "
            "then join again"
        ) from error


def _has_file(folder: Path, entry: FileEntry) -> bool:
    path = safe_path(folder, entry.name)
    try:
        return path.stat().st_size == entry.nbytes and file_sha256(path) == entry.sha256
    except OSError:
        return False


def _blocks(path: Path, nbytes: int) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each block of a file; the receiver refuses a file that changed after it was hashed."""
    with path.open("rb") as file:
        offset = 0
        while offset < nbytes or offset == 0:
            data = file.read(min(TRANSFER_BLOCK_BYTES, nbytes - offset))
            yield offset, data
            offset += len(data)
            if not data:
                return


def _check_free_space(folder: Path, nbytes: int) -> None:
    with convert_disk_errors(folder / partial_name("room")):
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


def _verify_and_rename(part: Path, path: Path, *, whole: bool) -> None:
    if not whole:
        raise PlaitError(
            f"{path.name} did not arrive as it was sent; did it change meanwhile? give the same command again"
        )
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.rename(path)
