"""A checkpoint assembled from copies of ranks' states, such as those in the memory of the remaining hosts after one was
lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import groupby
from math import prod
from pathlib import Path

import numpy as np

from plait.checked_json import parse_object
from plait.checkpoint.arrival import part_files
from plait.checkpoint.durable import clean_stop, require_space, write_durably
from plait.checkpoint.manifest import (
    Manifest,
    StoredPart,
    check_cover,
    parse_parts,
    parts_text,
    safetensors_header,
    sort_parts,
)
from plait.checkpoint.store import publish
from plait.errors import PlaitError, RunFailed
from plait.regular_file import reserve_space

BESIDE = "beside:"
"""Prefix of parts in a copy that another rank writes to a checkpoint."""
_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsCopy:
    """A copy of one rank's state: its parts, also those kept for other ranks, and a function that reads their bytes."""

    position: int
    """Samples taken by the run so far."""
    parts: tuple[StoredPart, ...]
    read: Callable[[int, int], bytes]
    """Reads bytes from an offset, as many as requested or a multiple of eight; raises PlaitError."""


def parse_copy(rank: int, text: bytes, data_bytes: int, read: Callable[[int, int], bytes]) -> PartsCopy:
    """A rank's copy, from the text that describes it; raises ValueError if a rank did not write it."""
    found, file = parse_object(text), part_files(rank)[0]
    position, parts = found.get("position"), parse_parts(found.get("parts"))
    if type(position) is not int or position < 0:
        raise ValueError(f"the copy of rank {rank} has no position")
    if any(part.file != file or part.begin + part.nbytes > data_bytes for part in parts):
        raise ValueError(f"the copy of rank {rank} is invalid")
    return PartsCopy(position=position, parts=parts, read=read)


def whole_state(copies: Sequence[PartsCopy], needs: Iterable[str]) -> list[list[StoredPart]]:
    """For each copy, the parts to take from it, so that together they contain each tensor exactly once.

    Raises RunFailed if they lack a part of a tensor, or a tensor that is needed.
    """
    offered = sorted(
        (
            (replace(part, tensor=part.tensor.removeprefix(BESIDE)), at)
            for at, one in enumerate(copies)
            for part in one.parts
        ),
        key=lambda pair: (pair[0].tensor, -prod(pair[0].extent), pair[0].offset, pair[1]),
    )
    taken: list[list[StoredPart]] = [[] for _ in copies]
    for tensor, group in groupby(offered, key=lambda pair: pair[0].tensor):
        chosen: list[StoredPart] = []
        for part, at in group:  # the largest first: a rank's whole tensor replaces the shards of several
            if not any(_overlap(part, other) for other in chosen):
                chosen.append(part)
                taken[at].append(part)
        try:
            check_cover(sort_parts(chosen))
        except ValueError as error:
            raise RunFailed(f"the copies in memory do not contain all of {tensor} ({error})") from None
    known = {part.tensor for parts in taken for part in parts}
    if missing := sorted(set(needs) - known):
        raise RunFailed(f"the copies in memory lack {missing[0]}")
    return taken


def publish_copies(
    copies: Sequence[PartsCopy],
    staging: Path,
    final: Path,
    *,
    step: int,
    model: dict[str, object],
    needs: Sequence[str],
) -> Manifest:
    """Write a checkpoint of `step` from copies of its state, wherever they are. One process calls this while no rank
    runs; blocks until the data are on disk. Raises RunFailed, with earlier checkpoints untouched, if the copies do not
    contain the whole state or cannot be read, and NoRoom if the disk is full."""
    if len({one.position for one in copies}) != 1:
        raise RunFailed("the copies in memory are of different positions in the data")
    chosen = [(one, parts) for one, parts in zip(copies, whole_state(copies, needs), strict=True) if parts]
    with clean_stop(staging):
        for made in (
            staging.parent,
            staging,
        ):  # not the folders above: a run's folder that was moved must not be created again
            made.mkdir(exist_ok=True)
        try:
            for number, (one, parts) in enumerate(chosen):
                _write_file(staging, number, one, parts)
        except RunFailed:
            raise
        except PlaitError as error:
            raise RunFailed(str(error)) from error
    position, files = copies[0].position, len(chosen)
    return publish(staging, final, step=step, cursor=position, model=model, world_size=files, needs=needs)


def _write_file(staging: Path, number: int, copy: PartsCopy, parts: Sequence[StoredPart]) -> None:
    """Write the file of one copy and its list of parts, under a rank's names."""
    file, list_name = part_files(number)
    begins = {(part.tensor, part.offset, part.extent): part.begin for part in parts}
    header, placed = safetensors_header(replace(part, file=file, key=_key(part)) for part in parts)
    nbytes = len(header) + sum(part.nbytes for part in placed)
    require_space(staging, nbytes)
    written: list[StoredPart] = []
    with (staging / file).open("wb") as out:
        reserve_space(out.fileno(), 0, nbytes)
        out.write(header)
        for part in placed:
            digest, at = sha256(), begins[part.tensor, part.offset, part.extent]
            end = at + part.nbytes
            while at < end:
                block = copy.read(at, min(end - at, _BLOCK_BYTES))
                if not block or len(block) > end - at:
                    raise RunFailed(f"a copy in memory ends within {part.tensor}")
                if not _is_finite(part.dtype, block):
                    raise RunFailed(f"{part.tensor} has numbers in the copies in memory that are not finite")
                digest.update(block)
                out.write(block)
                at += len(block)
            written.append(replace(part, sha256=digest.hexdigest()))
        out.flush()
        os.fsync(out.fileno())
    write_durably(staging / list_name, parts_text(sort_parts(written)).encode())


def _key(part: StoredPart) -> str:
    """The name that ranks give this part within a file."""
    place = ",".join(f"{at}:{at + size}" for at, size in zip(part.offset, part.extent, strict=True))
    return part.tensor if part.extent == part.shape else f"{part.tensor}[{place}]"


def _is_finite(dtype: str, block: bytes) -> bool:
    """Whether all numbers of a block are finite; integers always are."""
    if dtype == "BF16":  # numpy has no bfloat16: a number is finite unless all its exponent bits are set
        return not bool(((np.frombuffer(block, np.uint16) & 0x7F80) == 0x7F80).any())
    floats = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
    return dtype not in floats or bool(np.isfinite(np.frombuffer(block, floats[dtype])).all())


def _overlap(one: StoredPart, other: StoredPart) -> bool:
    sides = zip(one.offset, one.extent, other.offset, other.extent, strict=True)
    return all(at < other_at + other_size and other_at < at + size for at, size, other_at, other_size in sides)
