"""A working folder of several hosts: whether two work in the same one (one writes a nonce, the other looks for it), and
its lock."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.commands.hosts.file_names import safe_path
from plait.commands.hosts.file_transfer import convert_disk_errors
from plait.commands.planning.folder_lock import hold_lock
from plait.errors import PlaitError
from plait.private_folder import make_private_folder
from plait.regular_file import append_to_file


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
        if path.read_text(encoding="ascii") != content:
            return False
    except PermissionError:
        raise PlaitError(
            f"{folder} is the folder of the host that leads, but what it writes there cannot be read here; join as the "
            "user who started the run, or from a folder of your own"
        ) from None
    except (OSError, UnicodeDecodeError):
        return False
    own = path.with_name(f"{name}.seen")
    with convert_disk_errors(own):
        own.write_bytes(b"")
        own.unlink()
    return True


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
