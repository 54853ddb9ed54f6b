"""Parts of a checkpoint that come from other hosts: what a rank leaves behind, and waiting until all of it is here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from json import loads
from pathlib import Path
from typing import Literal

from plait.checkpoint.durable import NoRoom, earlier_checkpoints
from plait.checkpoint.manifest import StoredPart, parse_parts
from plait.checkpoint.shared_disk import names_now, size_now
from plait.errors import RunFailed
from plait.regular_file import read_regular_text

SILENCE_LIMIT_S = 60.0
RefusedFor = Literal["no room", "another reason"]
"""Why a rank's part of a checkpoint does not come: the same save may go well once there is room."""

_LOOK_EVERY_S = 0.02


def part_files(rank: int) -> tuple[str, str]:
    """Names of a rank's two files in the staging folder: its tensors, and their list, which is written last."""
    return f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json"


def parse_list(rank: int, data: bytes) -> tuple[StoredPart, ...]:
    """The parts that a rank says it has written; raises ValueError for what is no list, or names another's file."""
    parts, own = parse_parts(loads(data)), part_files(rank)[0]
    if odd := next((part.file for part in parts if part.file != own), None):
        raise ValueError(f"rank {rank} lists parts in {odd[:80]!r}, where it writes {own} alone")
    return parts


def await_parts(
    staging: Path,
    world_size: int,
    *,
    quiet_s: float = SILENCE_LIMIT_S,
    is_given_up: Callable[[], bool] = lambda: False,
    note_bytes: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Block until every rank's part lies in `staging`, for as long as bytes come; rank 0 alone calls it, before
    `publish`.

    Returns at once where all hosts share the folder. Calls `note_bytes` with the bytes that are there by now. Raises
    RunFailed when a part was refused, when nothing has come for `quiet_s`, or once it `is_given_up`, as a rank said by
    other means that it could not write.
    """
    missing = list(range(world_size))
    seen, news_at = -1, time.monotonic()
    while missing := _without(names_now(staging), missing):
        _raise_refusal(staging, missing)
        if is_given_up():
            raise _unheard_refusal(f"a part of it ({_ranks_text(missing)}) could not be written", staging, missing[0])
        arrived, now = _bytes_in(staging), time.monotonic()
        if arrived != seen:
            seen, news_at = arrived, now
            note_bytes(arrived)
        if now - news_at > quiet_s:
            raise RunFailed(_too_late(missing, now - news_at, staging.parent))
        threading.Event().wait(_LOOK_EVERY_S)


def _without(names: Collection[str], ranks: Sequence[int]) -> list[int]:
    """The ranks whose list is not among the names."""
    return [rank for rank in ranks if part_files(rank)[1] not in names]


def refuse_part(staging: Path, rank: int, sentence: str, why: RefusedFor = "another reason") -> None:
    """Tell the rank that waits for a part why it will not come, and remove the files of it that arrived. Recreates the
    staging folder if it is gone, so that the refusal is not lost. On a full disk the refusal is an empty file. Raises
    OSError."""
    staging.mkdir(exist_ok=True)
    for name in part_files(rank):
        (staging / name).unlink(missing_ok=True)
        (staging / partial_name(name)).unlink(missing_ok=True)
    aside = staging / partial_name(_refusal(rank, why))
    try:
        aside.write_text(sentence, encoding="utf-8")
    except OSError:  # part of it may have been written, and half a sentence is of no use
        aside.write_bytes(b"")
    aside.rename(staging / _refusal(rank, why))


def partial_name(name: str) -> str:
    """Name of a file while it is incomplete."""
    return f".{name}.part"


def _refusal(rank: int, why: RefusedFor) -> str:
    return f"rank-{rank:05d}.{'no-room' if why == 'no room' else 'refused'}"


def _raise_refusal(staging: Path, missing: Sequence[int]) -> None:
    for rank in missing:
        for path, kind in (
            (staging / _refusal(rank, "no room"), NoRoom),
            (staging / _refusal(rank, "another reason"), RunFailed),
        ):
            if not path.exists():
                continue
            if sentence := read_regular_text(path):
                raise kind(sentence)
            raise _unheard_refusal(f"rank {rank} could not write its part, and has no room to say why", staging, rank)


def _unheard_refusal(what: str, staging: Path, rank: int) -> RunFailed:
    """That a part will not come, where its rank's own sentence is not here; that rank is heard first, where it can
    be."""
    failed = NoRoom(
        f"could not save the checkpoint: {what}; {earlier_checkpoints(staging.parent)}: free some space and give the "
        "same command again"
    )
    failed.__cause__ = FileNotFoundError(part_files(rank)[1])
    return failed


def _bytes_in(staging: Path) -> int:
    total = 0
    for name in names_now(staging):
        try:
            total += size_now(staging / name)
        except FileNotFoundError:  # renamed between the two looks
            total += 1
        except OSError:  # no regular file, or unreadable: whoever needs it says so
            continue
    return total


def _too_late(missing: Sequence[int], waited_s: float, folder: Path) -> str:
    return (
        f"could not save the checkpoint: nothing came of the part of {_ranks_text(missing)} from another host for "
        f"{waited_s:.0f} s; {earlier_checkpoints(folder)}: fix the network between the hosts, or keep runs/ on a disk "
        "that they share, and give the same command again"
    )


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
