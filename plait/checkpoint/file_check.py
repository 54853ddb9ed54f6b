"""Whether a file of a checkpoint is what its manifest says: size and header, and the SHA-256 of its parts."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from plait.checkpoint.manifest import MANIFEST, StoredPart, safetensors_header
from plait.checkpoint.shared_disk import size_now
from plait.errors import PlaitError
from plait.regular_file import open_regular_file


@dataclass(frozen=True, slots=True, kw_only=True)
class HashShare:
    """The bytes of each file that are hashed: part `index` of `count` roughly equal ones."""

    index: int = 0
    count: int = 1

    def of(self, parts: Sequence[StoredPart]) -> list[StoredPart]:
        """The parts of a file, in file order, whose middle lies in this share: each part is in one share."""
        total, first = sum(part.nbytes for part in parts), parts[0].begin if parts else 0
        middles = ((part, 2 * (part.begin - first) + part.nbytes) for part in parts)
        last = self.count - 1
        return [part for part, twice in middles if min(twice * self.count // max(2 * total, 1), last) == self.index]


WHOLE_FILE = HashShare()


def check_file(
    path: Path, parts: Sequence[StoredPart], pool: ThreadPoolExecutor, share: HashShare = WHOLE_FILE
) -> None:
    """Hash one file's parts, or a share of them, the threads of `pool` side by side; raises PlaitError that says what
    is wrong."""
    expected = check_file_layout(path, parts)
    mine = share.of(expected)
    with open_regular_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        with memoryview(memory) as view:
            digests = list(pool.map(lambda part: _digest(view, part), mine))
        for part, digest in zip(mine, digests, strict=True):
            if digest != part.sha256:
                raise damaged_file(path, f"the bytes of {part.key} do not match manifest.json")


def check_file_layout(path: Path, parts: Sequence[StoredPart]) -> list[StoredPart]:
    """A file's parts in its order; raises PlaitError unless its size and header are those of these parts."""
    header, expected = safetensors_header(parts)
    if set(parts) != set(expected) or len({part.key for part in parts}) < len(parts):
        raise damaged_file(path.parent / MANIFEST, f"it misplaces the parts of {path.name}")
    if not path.is_file():
        raise PlaitError(
            f"{path} is missing", f"bring it back, or move {path.parent} away to go on from an older checkpoint"
        )
    size, wanted = size_now(path), len(header) + sum(part.nbytes for part in parts)
    if size != wanted:
        raise damaged_file(path, f"it has {size} bytes instead of {wanted}")
    with open_regular_file(path) as file:
        if file.read(len(header)) != header:
            raise damaged_file(path, "its header is not the one that manifest.json asks for")
    return expected


def _digest(view: memoryview, part: StoredPart) -> str:
    with view[part.begin : part.begin + part.nbytes] as data:
        return sha256(data).hexdigest()


def damaged_file(path: Path, why: str) -> PlaitError:
    """The error for a file of a checkpoint that is there and wrong."""
    return PlaitError(f"{path} is damaged: {why}", f"move {path.parent} away to go on from an older checkpoint")
