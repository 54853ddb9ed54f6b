"""Finds out whether two hosts work in the same folder: one writes a nonce, and the other looks for it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.commands.hosts.file_transfer import convert_disk_errors, safe_path
from plait.errors import PlaitError


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
