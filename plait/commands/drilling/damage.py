"""What a drill does to files: it damages a checkpoint, and has the disk of some processes full."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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


def largest_part_bytes(checkpoint: Path) -> int:
    """The size of the largest file of tensors in a checkpoint."""
    return max((path.stat().st_size for path in checkpoint.glob("*.safetensors")), default=0)


def room_for_logs(pids: Iterable[int], folder: Path, part_bytes: int) -> int | None:
    """A file size that the files which these processes have open in a run's folder stay below, while a checkpoint's
    file of so many bytes does not; None where there is none between."""
    sizes = [size for pid in pids for size in _open_sizes(pid, folder)]
    least = max(sizes, default=0) + _LEAST_ROOM_BYTES
    return (least + part_bytes) // 2 if least < part_bytes else None


@contextmanager
def full_disk(pids: Iterable[int], limit_bytes: int) -> Iterator[None]:
    """While the block lasts, these processes of this user can write no file beyond so many bytes: for the checkpoints
    of a run that is a full disk, and no other program notices anything. Needs no rights."""
    before: dict[int, tuple[int, int]] = {}
    for pid in pids:
        with suppress(ProcessLookupError):
            _, hard = before[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def _open_sizes(pid: int, folder: Path) -> Iterator[int]:
    """Sizes of what a process has open in a run's folder, without checkpoints that it is writing."""
    inside, saving = f"{folder.resolve()}/", f"{folder.resolve()}/checkpoints/"
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                path = str(link.readlink())
                if path.startswith(inside) and not path.startswith(saving):
                    yield link.stat().st_size
