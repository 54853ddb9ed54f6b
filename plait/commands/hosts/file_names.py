"""Files that another host names: plain names inside one folder, never a way out of it, and no links."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from plait.errors import PlaitError
from plait.launch.remote.wire import BLOB_BYTES_AT_MOST

TRANSFER_BLOCK_BYTES = BLOB_BYTES_AT_MOST

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def safe_path(folder: Path, name: str) -> Path:
    """A path in a folder, by the name that another host gave; raises PlaitError unless it is one plain name, and not
    that of a link."""
    if not check_file_name(name):
        raise PlaitError(f"another host named the file {name[:80]!r}, which plait never does; is it one of yours?")
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
            f"{path} is a link or lies behind one, and plait follows none for another host; put a folder of this "
            "host's own there, then join again"
        )


def read_block(folder: Path, name: str, offset: int, nbytes: int) -> tuple[int, bytes]:
    """A file's size and some of its bytes, for a host that fetches it; raises PlaitError for a name that leads out."""
    # Not what a link leads to, should the file have become one, nor a wait for a pipe's writer.
    descriptor = os.open(safe_path(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PlaitError(
                f"{name!r} is no file, and only files are fetched; install the same commit of plait on both"
            )
        file = os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
    with file:
        file.seek(offset)
        return status.st_size, file.read(min(nbytes, TRANSFER_BLOCK_BYTES))
