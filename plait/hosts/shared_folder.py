"""A working folder of several hosts: whether two work in the same one (one writes a nonce, the other looks for it),
what that means for a run, and its lock."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from plait.checkpoint.shared_disk import names_now
from plait.errors import PlaitError
from plait.hosts.files import check_file_name, convert_disk_errors, require_valid, safe_path
from plait.hosts.protocol import RequestKind
from plait.private_folder import make_private_folder
from plait.regular_file import append_to_file
from plait.run_folder import hold_lock

_NONCE_NAME, _NONCE = re.compile(r"nonce-[0-9a-f]{16}"), re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nonce:
    """A file with a random name and content that host 0 has just written into `folder`: a run's, or the cache."""

    folder: str
    name: str
    content: str

    def __post_init__(self) -> None:
        require_valid(_NONCE_NAME.fullmatch(self.name) and _NONCE.fullmatch(self.content), "Nonce.name or .content")
        top, _, run = self.folder.partition("/")
        require_valid(self.folder == ".plait" or (top == "runs" and check_file_name(run)), "Nonce.folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedQuestion:
    """Do you see these nonces at the same places below your working folder?"""

    nonces: tuple[Nonce, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedReply:
    """Whether the host works in the folder that host 0 works in."""

    shared: bool


SEE_FOLDER = RequestKind(name="see", question=SharedQuestion, reply=SharedReply)


@contextmanager
def write_nonce(folder: Path) -> Iterator[tuple[str, str]]:
    """Write a file of random name and content to `folder`, and yield both; the end of the block deletes it.

    Only the user who wrote it can read it, which is true of some files of a run as well.
    """
    name, content = f"nonce-{secrets.token_hex(8)}", secrets.token_hex(16)
    path = folder / name
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(content)
        yield name, content
    finally:
        path.unlink(missing_ok=True)


def has_nonce(folder: Path, name: str, content: str) -> bool:
    """Whether a nonce that another host has just written lies in this folder.

    Raises PlaitError where it does, and this host cannot work in the folder as that one does.
    """
    path = safe_path(folder, name)
    try:
        if name not in names_now(path.parent):
            return False
        if path.read_text(encoding="ascii") != content:
            return False
    except PermissionError:
        raise PlaitError(
            f"{folder} is the folder of the host that leads, but what it writes there cannot be read here; join as the "
            "user who started the run, or from a folder of your own"
        ) from None
    except (OSError, UnicodeDecodeError):
        return False
    own = path.with_name(f"{name}.{secrets.token_hex(4)}.seen")  # several hosts may look at the same moment
    with convert_disk_errors(own):
        own.write_bytes(b"")
        own.unlink()
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """The file system that a folder is on: its kind, such as nfs4, and how it is mounted."""

    kind: str
    options: frozenset[str]


def mount_of(folder: Path, mounts: str) -> Mount:
    """The mount of a folder, in the text of /proc/self/mountinfo (proc_pid_mountinfo(5)); a later one hides an
    earlier."""
    place, found = folder.resolve(), Mount(kind="", options=frozenset())
    longest = -1
    for line in mounts.splitlines():
        before, sign, after = line.partition(" - ")
        fields, more = before.split(), after.split()
        if not sign or len(fields) < 6 or len(more) < 3:
            continue
        point = fields[4].replace("\\040", " ")
        if place.is_relative_to(point) and len(point) >= longest:
            longest = len(point)
            options = frozenset((*fields[5].split(","), *more[2].split(",")))
            found = Mount(kind=more[0], options=options)
    return found


def shared_folder_lines(shared: Sequence[str], apart: Sequence[str], folder: str, mount: Mount) -> list[str]:
    """What it means for a run which other hosts share its folder; said once."""
    lines = []
    if shared:
        kind = f" ({mount.kind})" if mount.kind else ""
        lines.append(
            f"folder   {folder}{kind} is also that of {_names(shared)}, which saw a file that was just written here: "
            "workers write checkpoints there themselves, and nothing is sent"
        )
    if apart:
        lines.append(
            f"folder   {_names(apart)} {'shares' if len(apart) == 1 else 'share'} no folder with this host: data are "
            "sent once, and parts of checkpoints come back"
        )
    if shared and mount.options & _LOCAL_LOCKS:
        lines.append(
            "         · its locks hold on one host alone (mounted with nolock or local_lock): start this run from "
            "one host"
        )
    if shared and "soft" in mount.options:
        lines.append(
            "         · a server that is away makes a save fail after a while (mounted soft); earlier checkpoints "
            "stay whole"
        )
    return lines


_LOCAL_LOCKS = frozenset({"nolock", "local_lock=all", "local_lock=flock"})


def _names(hosts: Sequence[str]) -> str:
    shown = list(hosts[:8]) if len(hosts) > 9 else list(hosts)
    rest = [f"{len(hosts) - 8} more"] if len(hosts) > 9 else []
    *first, last = [*shown, *rest]
    return f"{', '.join(first)} and {last}" if first else last


@contextmanager
def working_folder_held(folder: Path) -> Iterator[None]:
    """Context in which no other joined host receives files in this working folder: two would damage each other's.

    Raises PlaitError where another holds it.
    """
    cache = folder / ".plait"
    with convert_disk_errors(cache / "joined"):
        make_private_folder(cache)
        lock = append_to_file(cache / "joined.lock")
    with lock:
        hold_lock(lock, f"another host that joined a run works in {folder}, too; join from another folder")
        yield
