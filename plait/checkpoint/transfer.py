"""Writes tensors to a checkpoint and reads them back: a rank writes its own parts and reads any rectangle."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256
from io import BufferedWriter
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from plait.checkpoint.arrival import part_files, partial_name
from plait.checkpoint.durable import clean_stop, require_space, write_durably
from plait.checkpoint.host_bytes import host_bytes
from plait.checkpoint.manifest import ITEM_BYTES, Manifest, StoredPart, parts_text, safetensors_header, sort_parts
from plait.checkpoint.shared_disk import rename_for_all, sync_folder
from plait.errors import PlaitError, RunFailed
from plait.regular_file import reserve_space

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
OpenPart = Callable[[StoredPart, np.dtype[Any]], np.ndarray]
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}

assert DTYPES.keys() == ITEM_BYTES.keys()
assert sys.byteorder == "little"  # the bytes that are hashed and stored are those in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice:
    """A rectangle of a global tensor: its values, the global tensor's `shape`, and its `offset` in that."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def whole_slice(tensor: torch.Tensor) -> TensorSlice:
    """The slice for a tensor that this rank holds entirely."""
    return TensorSlice(tensor=tensor, shape=tuple(tensor.shape), offset=(0,) * tensor.dim())


def share_out(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Which whole tensors each of `ranks` equal replicas writes, so that all write about the same number of bytes.

    The largest goes first, each to whoever has least: the same answer on every rank without asking anyone.
    """
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        loads[rank] += sizes[name]
    return [sorted(share) for share in shares]


class WritePart(Protocol):
    """Writes a rank's part of a checkpoint, as `write_rank` does."""

    def __call__(
        self,
        staging: Path,
        rank: int,
        tensors: Mapping[str, TensorSlice | Sequence[TensorSlice]],
        *,
        when_full: Literal["clear all", "clear own"] = "clear all",
    ) -> None: ...


def write_rank(
    staging: Path,
    rank: int,
    tensors: Mapping[str, TensorSlice | Sequence[TensorSlice]],
    *,
    when_full: Literal["clear all", "clear own"] = "clear all",
) -> None:
    """Write this rank's slices of global tensors, durably; every rank of a job calls it, with {} if it has none.

    Blocks until the disk has the bytes. Device tensors pass through host memory piece by piece. Raises RunFailed, and
    NoRoom where the disk is full: then it removes the folder, or only its own files, as other ranks' may be fetched.
    """
    file, name = part_files(rank)
    with clean_stop(staging, (file, name, partial_name(name)) if when_full == "clear own" else ()):
        header, parts, local = rank_layout(rank, tensors)
        for made in (staging.parent, staging):  # not what is above: a run's folder that was moved is not made again
            made.mkdir(exist_ok=True)
        if staging.is_symlink():
            raise RunFailed(f"{staging} is a link, and what it leads to would be overwritten; delete the link")
        require_space(staging, len(header) + sum(part.nbytes for part in parts))
        with (staging / file).open("wb") as out, ThreadPoolExecutor(1) as hasher:
            # Before the first byte: the ranks write at the same time, and each has asked for its own part alone.
            reserve_space(out.fileno(), 0, len(header) + sum(part.nbytes for part in parts))
            out.write(header)
            written = [_write(out, part, local[part.key], hasher) for part in parts]
            out.flush()
            os.fsync(out.fileno())
        aside = staging / partial_name(name)
        write_durably(aside, parts_text(sort_parts(written)).encode())
        sync_folder(staging)
        # Nothing after the rename: rank 0, which waits for this name, may take the folder away at that moment. It also
        # has the disk keep the names.
        rename_for_all(aside, staging / name)


def rank_layout(
    rank: int, tensors: Mapping[str, TensorSlice | Sequence[TensorSlice]]
) -> tuple[bytes, list[StoredPart], Mapping[str, torch.Tensor]]:
    """A rank's file before it is written: its header, its parts in file order without their hashes, and each part's
    tensor by its key."""
    file = part_files(rank)[0]
    parted = [(stored_part(name, one, file), one) for name, some in tensors.items() for one in _listed(some)]
    # Keyed by name, so that a box that is passed twice, such as an empty share, is written once.
    parts_by_key, local = {part.key: part for part, _ in parted}, {part.key: one.tensor for part, one in parted}
    header, parts = safetensors_header(parts_by_key.values())
    return header, parts, local


def read_tensor(path: Path, manifest: Manifest, tensor: str) -> torch.Tensor:
    """A whole global tensor, bit for bit, on the CPU."""
    shape = manifest.parts_of(tensor)[0].shape
    return read_slice(path, manifest, tensor, (0,) * len(shape), shape)


def read_slice(
    path: Path, manifest: Manifest, tensor: str, offset: Sequence[int], extent: Sequence[int]
) -> torch.Tensor:
    """Any rectangle of a global tensor, bit for bit, on the CPU, put together from whatever parts hold it.

    Touches only the pages that it needs. The manifest must come from `verify` or `newest_good` of the same path.
    """

    def opened(part: StoredPart, dtype: np.dtype[Any]) -> np.ndarray:
        try:
            return np.memmap(path / part.file, dtype, "r", part.begin, (part.nbytes // dtype.itemsize,))
        except (OSError, ValueError) as error:
            raise PlaitError(
                f"{path / part.file} can no longer be read ({error}); was it moved? give the command again"
            ) from error

    return slice_of_parts(manifest.parts_of(tensor), offset, extent, opened)


def slice_of_parts(
    parts: Sequence[StoredPart], offset: Sequence[int], extent: Sequence[int], open_part: OpenPart
) -> torch.Tensor:
    """Any rectangle of a global tensor that these parts of it cover; `open_part` gives the numbers of a part, flat."""
    shape = parts[0].shape
    assert len(offset) == len(extent) == len(shape)
    assert all(at >= 0 and at + size <= full for at, size, full in zip(offset, extent, shape, strict=True))
    result = torch.empty(tuple(extent), dtype=DTYPES[parts[0].dtype])
    # numpy has no bfloat16, so the raw bits are copied.
    bits = result.view(_BITS[result.element_size()]).numpy()
    for part in parts:
        _copy_overlap(part, offset, bits, open_part)
    return result


def _listed(slices: TensorSlice | Sequence[TensorSlice]) -> Iterable[TensorSlice]:
    return [slices] if isinstance(slices, TensorSlice) else slices


def stored_part(name: str, one: TensorSlice, file: str) -> StoredPart:
    """A slice as a part of a rank's file, before its place and hash are known."""
    extent = tuple(one.tensor.shape)
    place = ",".join(f"{at}:{at + size}" for at, size in zip(one.offset, extent, strict=True))
    return StoredPart(
        tensor=name,
        dtype=_CODES[one.tensor.dtype],
        shape=one.shape,
        offset=one.offset,
        extent=extent,
        file=file,
        key=name if extent == one.shape else f"{name}[{place}]",
        begin=0,
        sha256="",
    )


def _write(out: BufferedWriter, part: StoredPart, tensor: torch.Tensor, hasher: Executor) -> StoredPart:
    """Write a part, which another thread hashes meanwhile: each byte is read once by each."""
    digest = sha256()
    for piece in host_bytes(tensor):
        hashed = hasher.submit(digest.update, piece)
        out.write(piece)
        hashed.result()
    return replace(part, sha256=digest.hexdigest())


def _copy_overlap(part: StoredPart, offset: Sequence[int], bits: np.ndarray, open_part: OpenPart) -> None:
    """Copy what `part` holds of the rectangle `bits`, which begins at `offset` of the global tensor."""
    into, source = [], []
    for at, size, part_at, part_size in zip(offset, bits.shape, part.offset, part.extent, strict=True):
        low, high = max(at, part_at), min(at + size, part_at + part_size)
        if low >= high:
            return
        into.append(slice(low - at, high - at))
        source.append(slice(low - part_at, high - part_at))
    bits[tuple(into)] = open_part(part, bits.dtype).reshape(part.extent)[tuple(source)]
