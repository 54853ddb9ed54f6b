"""What a drill does to files: it damages a checkpoint, and has the disk of some processes full."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from plait.checkpoint.arrival import part_files

_CUT_BYTES = 4096
_LEAST_ROOM_BYTES = 1 << 12


def damage_checkpoint(checkpoint: Path, dice: random.Random) -> str:
    """Flip one bit of one of a checkpoint's files, cut a piece off its end, or delete it, as the dice say; returns what
    was done."""
    path = dice.choice(sorted(path for path in checkpoint.iterdir() if path.is_file()))
    name, size = f"{checkpoint.name}/{path.name}", path.stat().st_size
    how = dice.choice(("bit", "end", "whole"))
    if how == "bit":
        at, bit = dice.randrange(size), dice.randrange(8)
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << bit]))
        return f"bit {bit} of byte {at} of {name} was flipped"
    if how == "end":
        lost = dice.randint(1, min(size, _CUT_BYTES))
        with path.open("r+b") as file:
            file.truncate(size - lost)
        return f"the last {lost} bytes of {name} were cut off"
    path.unlink()
    return f"{name} was deleted"


def limits_below_parts(pids: Mapping[int, int], folder: Path, checkpoint: Path) -> dict[int, int]:
    """By process, a file size in bytes between those of its logs and that of its part of a checkpoint. `pids` holds
    ranks' processes by rank; left out are those whose logs in the run's folder have outgrown their part."""
    limits = {}
    for rank, pid in pids.items():
        part, _ = part_files(rank)
        with suppress(FileNotFoundError):  # this rank writes none
            nbytes = (checkpoint / part).stat().st_size
            least = max(_open_sizes(pid, folder), default=0) + _LEAST_ROOM_BYTES
            if least < nbytes:
                limits[pid] = (least + nbytes) // 2
    return limits


@contextmanager
def full_disk(limits: Mapping[int, int]) -> Iterator[None]:
    """While the block lasts, each of these processes of this user can write no file beyond its limit in bytes: for the
    checkpoints of a run that is a full disk, and no other program notices anything. Needs no rights."""
    before: dict[int, tuple[int, int]] = {}
    for pid, limit_bytes in limits.items():
        with suppress(ProcessLookupError):
            _, hard = before[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        for pid, own in before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, own)


def _open_sizes(pid: int, folder: Path) -> Iterator[int]:
    """Sizes of what a process has open in a run's folder, without checkpoints that it is writing."""
    inside, saving = f"{folder.resolve()}/", f"{folder.resolve()}/checkpoints/"
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                path = str(link.readlink())
                if path.startswith(inside) and not path.startswith(saving):
                    yield link.stat().st_size
