"""Copies files between the hosts of a run, in blocks: what may travel, how it is offered, sent, fetched and received.

A file gets its name only when it is complete. Names from another host are plain names inside one folder, never a way
out of it, and no links are followed.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, TypeVar, cast

from plait.checkpoint.arrival import partial_name
from plait.checkpoint.durable import NoRoom
from plait.data.index import file_sha256
from plait.errors import PlaitError, disk_advice
from plait.hosts.protocol import Nothing, Peer, ReadReply, RequestKind
from plait.hosts.wire import BLOB_BYTES_AT_MOST
from plait.private_folder import make_private_folder
from plait.units import format_bytes
from plait.workers import ROUTING

TRANSFER_BLOCK_BYTES = BLOB_BYTES_AT_MOST
CHECKPOINT_NAME = re.compile(r"step-[0-9]{1,12}")
STAGING_NAME = re.compile(r"\.step-[0-9]{1,12}(\.gen-[0-9]{1,12})?\.staging")
"""The folder in which ranks write a checkpoint before it is published."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_OWN_FOLDERS = ("checkpoints", "logs")
_FIRST_BLOCK_BYTES, _LEAST_BLOCK_BYTES, _BLOCK_S = TRANSFER_BLOCK_BYTES // 4, 1 << 14, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file as it should be on the other host; `name` is its path below the folder that travels."""

    name: str
    nbytes: int
    sha256: str

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise ValueError(f"{self.name[:80]!r} has {self.nbytes} bytes")


JOB_FILES = frozenset({"recipe.toml", "plan.json", ROUTING})
"""The files that host 0 may send into the folder of a run or a job itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Which of these files are missing in a folder of the cache (prepared data, or a model to go on from), in one below
    the current folder or, with an empty path, in the current folder itself?"""

    root: Literal["cache", "folder"]
    path: str
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        if self.root == "cache":
            top, _, name = self.path.partition("/")
            require_valid(top in ("data", "models") and check_file_name(name), "Offer.path")
        elif not self.path:
            require_valid({file.name for file in self.files} <= JOB_FILES, "Offer.files")
        elif self.checkpoint is None:
            require_valid(check_file_name(self.path) and self.path not in _OWN_FOLDERS, "Offer.path")

    @property
    def content(self) -> Literal["data", "model"]:
        """What a folder of the cache holds."""
        return "model" if self.path.startswith("models/") else "data"

    @property
    def checkpoint(self) -> str | None:
        """The name of the checkpoint that is offered ("step-10"); None for data."""
        top, _, name = self.path.partition("/")
        return name if self.root == "folder" and top == "checkpoints" and CHECKPOINT_NAME.fullmatch(name) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeader:
    """The bytes beside this are those of an offered file, from `offset` on."""

    name: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """Give me at most this many bytes of a file of the current folder, or of a checkpoint that its ranks now write."""

    name: str
    offset: int = 0
    bytes: int = 0
    staging: str | None = None

    def __post_init__(self) -> None:
        require_valid(self.offset >= 0 and self.bytes >= 0, "ReadRequest.offset or ReadRequest.bytes")
        require_valid(self.staging is None or STAGING_NAME.fullmatch(self.staging), "ReadRequest.staging")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferReply:
    """Where the offered files will lie on the other host, and which of them it lacks."""

    folder: str
    lacking: tuple[str, ...]


OFFER_FILES = RequestKind(
    name="take", question=Offer, reply=OfferReply, reply_within_s=6 * 3600.0
)  # it hashes the files that it has
SEND_BLOCK = RequestKind(
    name="block", question=BlockHeader, reply=Nothing, blob_bytes=BLOB_BYTES_AT_MOST, reply_within_s=3600.0
)  # after the last one it waits for disks
READ_FILE = RequestKind(name="read", question=ReadRequest, reply=ReadReply, reply_blob_bytes=BLOB_BYTES_AT_MOST)


def require_valid(fact: object, what: str) -> None:
    """Raise ValueError, which names the field of the message, unless the fact holds."""
    if not fact:
        raise ValueError(f"{what} is invalid")


def safe_path(folder: Path, name: str) -> Path:
    """A path in a folder, by the name that another host gave; raises PlaitError unless it is one plain name, and not
    that of a link."""
    if not check_file_name(name):
        raise PlaitError(f"another host named the file {name[:80]!r}, which plait never does", "is it one of yours?")
    refuse_links(folder, folder / name)
    return folder / name


def check_file_name(name: str) -> bool:
    """Whether a name from another host is one plain component of a path; runs and files that travel have such names."""
    return _FILE_NAME.fullmatch(name) is not None


def refuse_links(folder: Path, path: Path) -> None:
    """Raise PlaitError where a link stands between a folder and a path below it: another host must not be led by it.

    The folder itself may be reached over links, which are then this host's own choice.
    """
    if path.resolve() != folder.resolve() / path.relative_to(folder):
        raise PlaitError(
            f"{path} is a link or lies behind one, and plait follows none for another host",
            "put a folder of this host's own there, then join again",
        )


def read_block(folder: Path, name: str, offset: int, nbytes: int) -> tuple[int, bytes]:
    """A file's size and some of its bytes, for a host that fetches it; raises PlaitError for a name that leads out."""
    # Not what a link leads to, should the file have become one, nor a wait for a pipe's writer.
    descriptor = os.open(safe_path(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PlaitError(
                f"{name!r} is not a file, and only files are fetched", "install the same commit of plait on both"
            )
        file = os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
    with file:
        file.seek(offset)
        return status.st_size, file.read(min(nbytes, TRANSFER_BLOCK_BYTES))


def file_entries_of(
    folder: Path, *, final_name: str, known_hashes: Mapping[str, str] | None = None
) -> tuple[FileEntry, ...]:
    """The files of a flat folder, `final_name` at the end: the one whose presence says that the folder is complete.

    `known_hashes` are SHA-256 of files that need not be read for it.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and check_file_name(path.name))
    assert final_name in names, f"{folder} has no {final_name}"
    ordered = [name for name in names if name != final_name] + [final_name]
    return named_entries(folder, ordered, known_hashes or {})


def named_entries(folder: Path, names: Iterable[str], known_hashes: Mapping[str, str]) -> tuple[FileEntry, ...]:
    """These files of a folder, in this order; those without a known SHA-256 are read for it."""
    return tuple(
        FileEntry(
            name=name,
            nbytes=(folder / name).stat().st_size,
            sha256=known_hashes.get(name) or file_sha256(folder / name),
        )
        for name in names
    )


def send_folder(peer: Peer, folder: Path, offer: Offer) -> tuple[str, int]:
    """Send the files of a folder that the other host lacks; returns as `send_offer`."""
    return send_offer(peer, offer, lambda name: (folder / name).open("rb"))


def send_offer(peer: Peer, offer: Offer, opened: Callable[[str], BinaryIO]) -> tuple[str, int]:
    """Send the files of an offer that the other host lacks, each as it is `opened` by its name; returns the folder's
    path there, and how many bytes travelled. If it is cut off half-way, the next call continues after the last complete
    file."""
    found = peer.ask(OFFER_FILES, offer).values
    sizes = {fact.name: fact.nbytes for fact in offer.files}
    if unknown := set(found.lacking) - sizes.keys():
        raise PlaitError(
            f"{peer.name} asked for {min(unknown)[:80]!r}, which was not offered", "install the same commit on both"
        )
    for name in found.lacking:
        for offset, block in _blocks(opened(name), sizes[name]):
            peer.ask(SEND_BLOCK, BlockHeader(name=name, offset=offset), block)
    return found.folder, sum(sizes[name] for name in found.lacking)


class BlockQuestion(Protocol):
    """A question for some bytes of a file: a ReadRequest, or the like."""

    @property
    def offset(self) -> int: ...
    @property
    def bytes(self) -> int: ...


_Q = TypeVar("_Q", bound=BlockQuestion)


def fetch_file(
    peer: Peer,
    request: RequestKind[_Q, ReadReply],
    question: _Q,
    target: Path,
    *,
    is_cancelled: Callable[[], bool] = lambda: False,
    check: Callable[[Path], None] = lambda path: None,
) -> None:
    """Copy a file from the other host; it appears as `target` only when all of it is on the disk.

    `question` names the file there; its place and number of bytes are filled in here. `is_cancelled` is called before
    each block; raises PlaitError as soon as it returns True. `check` looks at the file before it gets its name, and
    raises where it may not. Blocks are so small that one takes about a second of a slow link, on which heartbeats
    travel as well. Raises NoRoom where this host's disk is full.
    """
    part = target.with_name(partial_name(target.name))
    with part.open("wb") as file:
        size, wanted = None, _FIRST_BLOCK_BYTES
        while size is None or file.tell() < size:
            if is_cancelled():
                raise PlaitError(f"{target.name} is not needed any more", "give the same command again")
            asked_at_s = time.monotonic()
            answer = peer.ask(request, replace(cast(Any, question), offset=file.tell(), bytes=wanted))
            took_s = time.monotonic() - asked_at_s
            wanted = min(2 * wanted, TRANSFER_BLOCK_BYTES) if took_s < _BLOCK_S / 2 else wanted
            wanted = max(wanted // 2, _LEAST_BLOCK_BYTES) if took_s > _BLOCK_S else wanted
            if size is None:
                size = answer.values.size
                _refuse_without_space(peer, target, size)
            if size != answer.values.size or file.tell() + len(answer.blob) > size:
                raise PlaitError(f"{peer.name} changed {target.name} while it was sent", "give the same command again")
            if not answer.blob and file.tell() < size:
                raise PlaitError(f"{peer.name} sent less of {target.name} than it has", "give the same command again")
            file.write(answer.blob)
        file.flush()
        os.fsync(file.fileno())
    check(part)
    part.rename(target)


def _refuse_without_space(peer: Peer, target: Path, nbytes: int) -> None:
    free = _free_bytes(target.parent)
    if not 0 <= nbytes <= free:
        raise NoRoom(
            f"{target.name} of {peer.name} has {nbytes} bytes, and in {target.parent} {format_bytes(free)} are free; "
            "free some space, then give the same command again"
        )


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
    def hashes(self) -> Mapping[str, str]:
        """The SHA-256 of each file that was offered, by name."""
        return {name: fact.sha256 for name, fact in self._expected.items()}

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
            raise PlaitError(f"another host sent {name[:80]!r}, which was not requested", "give the same command again")
        path, fact = safe_path(self.folder, name), self._expected[name]
        if offset + len(data) > fact.nbytes:
            raise PlaitError(f"another host sent more of {name[:80]!r} than it offered", "give the same command again")
        self._partial_path = part = path.with_name(partial_name(path.name))
        with convert_disk_errors(part):
            _write_at(part, offset, data)
            self._digest = self._digest if offset else sha256()
            self._digest.update(data)
            if offset + len(data) == fact.nbytes:
                _verify_and_rename(part, path, whole=self._digest.hexdigest() == fact.sha256)
                self._still_missing.discard(name)


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
            f"this host cannot write {path.parent} ({error.strerror})", f"{disk_advice(error)}, then join again"
        ) from error


def _has_file(folder: Path, entry: FileEntry) -> bool:
    path = safe_path(folder, entry.name)
    try:
        return path.stat().st_size == entry.nbytes and file_sha256(path) == entry.sha256
    except OSError:
        return False


def _blocks(file: BinaryIO, nbytes: int) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each block of a file; the receiver refuses a file that changed after it was hashed."""
    with file:
        offset = 0
        while offset < nbytes or offset == 0:
            data = file.read(min(TRANSFER_BLOCK_BYTES, nbytes - offset))
            yield offset, data
            offset += len(data)
            if not data:
                return


def _check_free_space(folder: Path, nbytes: int) -> None:
    with convert_disk_errors(folder / partial_name("room")):
        make_private_folder(folder)
        free = _free_bytes(folder)
    if free < nbytes:
        raise PlaitError(
            f"the run's files need {format_bytes(nbytes)} in {folder} on this host, where {format_bytes(free)} are "
            "free",
            "free some space, then join again",
        )


def _free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _write_at(part: Path, offset: int, data: bytes) -> None:
    with part.open("r+b" if offset else "wb") as file:
        if file.seek(0, os.SEEK_END) != offset:
            raise PlaitError(f"a piece of {part.name} is missing", "give the same command again")
        file.write(data)


def _verify_and_rename(part: Path, path: Path, *, whole: bool) -> None:
    if not whole:
        raise PlaitError(
            f"{path.name} did not arrive as it was sent", "did it change meanwhile? give the same command again"
        )
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.rename(path)
