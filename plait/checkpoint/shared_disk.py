"""Files that other hosts write, on a disk that they share: looked at so that nothing stale is believed.

NFS keeps names, missing ones too, and sizes for up to a minute; what it looks up again is what is opened
(close-to-open, RFC 7530 section 10.3.1). So names are listed, sizes are asked of opened files, and a rename whose
answer was lost, which the client then repeats in vain, is looked up.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from plait.regular_file import open_regular_file

_NO_SUCH_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS)
_STILL_OPEN = ".nfs"
"""NFS's name for a file that was deleted while a process had it open; it disappears by itself."""


def names_now(folder: Path) -> set[str]:
    """The names in a folder as whoever keeps it has them now; raises OSError."""
    return {name for name in os.listdir(folder) if not name.startswith(_STILL_OPEN)}  # noqa: PTH208  opens the folder


def size_now(path: Path) -> int:
    """A file's size as whoever keeps it has it now; raises OSError."""
    with open_regular_file(path) as file:
        return os.fstat(file.fileno()).st_size


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in `folder`: a new or renamed file is not safe before.

    Some network file systems have no such call, and have the names when they have answered.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SUCH_SYNC:
            raise
    finally:
        os.close(descriptor)


def rename_for_all(source: Path, target: Path, rename: Callable[[Path, Path], object] = os.rename) -> None:
    """Rename a file or folder; raises OSError where it was not done.

    A server that did it and whose answer was lost says of the repetition that there is no such file: then the target is
    what the source was.
    """
    was = source.stat()
    try:
        rename(source, target)
    except FileNotFoundError:
        if not (target.exists() and os.path.samestat(was, target.stat())):
            raise
