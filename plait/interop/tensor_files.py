"""Which tensor lies where in the safetensors files of a model's folder; headers alone are read, and checked."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from plait.checked_json import parse_json
from plait.errors import PlaitError
from plait.interop.links import refuse_links_out
from plait.regular_file import open_regular_file, read_regular_file

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1}
"""Bytes of a number of each dtype that plait reads, by safetensors' name; bytes only where numbers are packed in
them."""
PACKED, PACKED_SCALES = "_blocks", "_scales"
"""How the names of two tensors end that hold a weight's numbers packed (mxfp4.py), after the weight's own name."""
PACKED_GROUP = 32
"""Packed numbers that share a scale."""
LARGEST_HEADER = 100_000_000
COMPARED_BYTES = 1 << 24
"""How much of each of two tensors lies in memory at a time while they are compared."""
_NO_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a safetensors file, row by row from byte `begin` on."""

    name: str
    file: Path
    dtype: str
    """A key of ITEM_SIZES."""
    shape: tuple[int, ...]
    begin: int


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder's safetensors files, by name; raises PlaitError for missing and damaged files, and for
    links out of the folder."""
    refuse_links_out(folder, (INDEX, "*.safetensors"))
    try:
        if (folder / INDEX).exists():
            return _indexed(folder)
        return {tensor.name: tensor for tensor in read_header(_only_file(folder))}
    except OSError as error:
        raise PlaitError(
            f"{error.filename or folder} cannot be read ({error.strerror}); check its permissions and the disk"
        ) from None


def same_numbers(one: StoredTensor, other: StoredTensor, at_once: int = COMPARED_BYTES) -> bool:
    """Whether two tensors have the same dtype, shape and bytes, of which `at_once` are read at a time; raises
    PlaitError where a file cannot be read."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left = prod(one.shape) * ITEM_SIZES[one.dtype]
    try:
        with open_regular_file(one.file) as first, open_regular_file(other.file) as second:
            first.seek(one.begin)
            second.seek(other.begin)
            while left:
                pieces = [opened.read(min(left, at_once)) for opened in (first, second)]
                if pieces[0] != pieces[1] or not pieces[0]:
                    return False
                left -= len(pieces[0])
    except OSError as error:
        raise PlaitError(
            f"{error.filename or one.file} cannot be read ({error.strerror}); check its permissions and the disk"
        ) from None
    return True


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one safetensors file; raises PlaitError where the file is not whole."""
    size = file.stat().st_size
    with open_regular_file(file) as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else LARGEST_HEADER + 1
        if length > min(LARGEST_HEADER, size - 8):
            raise _damaged(file, "its header is cut off")
        text = opened.read(length)
    try:
        table = parse_json(text)
    except ValueError as error:
        raise _damaged(file, str(error)) from None
    if not isinstance(table, dict):
        raise _damaged(file, "its header is not a table")
    table.pop("__metadata__", None)
    tensors = [_stored(file, name, entry, 8 + length) for name, entry in table.items()]
    end = 8 + length
    for tensor in sorted(tensors, key=lambda one: one.begin):
        if tensor.begin != end:
            raise _damaged(file, f"{tensor.name} does not begin where the tensor before it ends")
        end += prod(tensor.shape) * ITEM_SIZES[tensor.dtype]
    if end != size:
        raise _damaged(file, f"it has {size:,} bytes instead of {end:,}")
    return tensors


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    places = _weight_map(folder / INDEX)
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(places.values())):
        if not (folder / name).is_file():
            raise PlaitError(f"{folder / INDEX} names {name}, which is not there; bring that file, too")
        found |= {tensor.name: tensor for tensor in read_header(folder / name)}
    if (folder / WHOLE).exists() and WHOLE not in places.values():
        raise PlaitError(
            f"{folder} holds two sets of weights: {WHOLE}, and the files that {INDEX} names; remove one of them"
        )
    for tensor, file in places.items():
        if tensor not in found or found[tensor].file.name != file:
            raise PlaitError(f"{folder / INDEX} says that {tensor} is in {file}, and it is not; bring the right files")
    return found


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        places = parse_json(read_regular_file(index)).get("weight_map")
    except (ValueError, AttributeError) as error:
        raise PlaitError(f"{index} is damaged ({error}); download it again") from None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise PlaitError(f"{index} has no weight_map from tensors to files; download it again")
    for name in places.values():
        if name != Path(name).name or name in ("", ".", "..") or "\0" in name or not name.endswith(".safetensors"):
            raise PlaitError(
                f"{index} names {name!r}, which is not a safetensors file of its own folder; download it again"
            )
    return places


def _only_file(folder: Path) -> Path:
    if (folder / WHOLE).exists():
        return folder / WHOLE
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise PlaitError(f"{folder} has {len(files)} safetensors files and no {INDEX}; bring that file, too")
    pickled = [path.name for pattern in _NO_WEIGHTS for path in sorted(folder.glob(pattern))]
    if pickled:
        raise PlaitError(
            f"{folder} has its weights as {pickled[0]} only, a pickle, which can run code when it is read; convert it "
            "on a machine that you trust it on: load it with transformers and call save_pretrained"
        )
    raise PlaitError(f"{folder} holds no weights; it should have {WHOLE}, or {INDEX} and the files that it names")


def _stored(file: Path, name: str, entry: Any, start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise _damaged(file, f"its entry of {name[:80]} is not a table")
    dtype, shape, places = entry.get("dtype"), _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if shape is None or places is None or len(places) != 2:
        raise _damaged(file, f"its entry of {name[:80]} lacks shape or data_offsets")
    if dtype not in ITEM_SIZES or (dtype == "U8" and not name.endswith((PACKED, PACKED_SCALES))):
        raise PlaitError(
            f"{name} in {file} is stored as {str(dtype)[:20]}, which plait does not read; convert the model to bf16 or "
            "float32"
        )
    if places[1] - places[0] != prod(shape) * ITEM_SIZES[dtype]:
        raise _damaged(file, f"{name[:80]} has {places[1] - places[0]} bytes, and its shape asks for others")
    return StoredTensor(name=name, file=file, dtype=dtype, shape=shape, begin=start + places[0])


def _counts(values: object) -> tuple[int, ...] | None:
    """The numbers of a list of counts; None for anything else."""
    is_list = isinstance(values, list) and all(type(one) is int and 0 <= one < 2**60 for one in values)
    return tuple(values) if is_list and isinstance(values, list) else None


def _damaged(file: Path, why: str) -> PlaitError:
    return PlaitError(f"{file} is damaged: {why}; download it again")
