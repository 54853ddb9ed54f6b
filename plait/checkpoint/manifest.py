"""A checkpoint's contents as a value: rectangular parts of named global tensors, listed in manifest.json."""

from __future__ import annotations

import json
import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from itertools import groupby
from math import prod
from typing import Any

from plait.errors import PlaitError

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""The element types that a checkpoint may hold, by their safetensors names."""

_FILE = re.compile(r"rank-\d{5}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """A rectangle of the global tensor `tensor`: `extent` elements from `offset` on, at byte `begin` of `file`.

    `key` is its name inside that safetensors file; `sha256` is that of its raw little-endian bytes.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    file: str
    key: str
    begin: int
    sha256: str

    @property
    def nbytes(self) -> int:
        return prod(self.extent) * ITEM_BYTES[self.dtype]


_FIELDS = tuple(field.name for field in fields(StoredPart))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One checkpoint: its step, data cursor, model shape, and all parts sorted by tensor and offset."""

    step: int
    cursor: int
    model: Mapping[str, object]
    parts: tuple[StoredPart, ...]

    def parts_of(self, tensor: str) -> Sequence[StoredPart]:
        """All parts of one tensor; raises PlaitError where the checkpoint has none."""
        first = bisect_left(self.parts, tensor, key=lambda part: part.tensor)
        last = bisect_right(self.parts, tensor, key=lambda part: part.tensor)
        if first == last:
            raise PlaitError(
                f"this checkpoint has no tensor {tensor}; was it made by another kind of model or optimizer?"
            )
        return self.parts[first:last]


def tensor_names(manifest: Manifest) -> list[str]:
    """The names of all global tensors of a checkpoint, sorted."""
    return list(dict.fromkeys(part.tensor for part in manifest.parts))


def safetensors_header(parts: Iterable[StoredPart]) -> tuple[bytes, list[StoredPart]]:
    """The header of the one safetensors file that holds these parts, and the parts in file order with `begin` set.

    Writer and reader both derive the file's layout here, so a header found on disk is never trusted.
    """
    # Wide elements first: each part then starts at a multiple of its element size, as memory maps like it.
    ordered = sorted(parts, key=lambda part: (-ITEM_BYTES[part.dtype], part.key))
    table: dict[str, object] = {}
    begins, position = [], 0
    for part in ordered:
        begins.append(position)
        position += part.nbytes
        table[part.key] = {"dtype": part.dtype, "shape": part.extent, "data_offsets": [begins[-1], position]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, [replace(part, begin=len(header) + begin) for part, begin in zip(ordered, begins, strict=True)]


def sort_parts(parts: Iterable[StoredPart]) -> tuple[StoredPart, ...]:
    """Parts in the order in which a manifest lists them."""
    return tuple(sorted(parts, key=lambda part: (part.tensor, part.offset, part.extent, part.file)))


def parts_text(parts: Iterable[StoredPart]) -> str:
    """Parts as a JSON list with one part a line, so that two manifests can be compared by `diff`."""
    rows = ",\n".join(json.dumps({name: getattr(part, name) for name in _FIELDS}) for part in parts)
    return f"[\n{rows}\n]" if rows else "[]"


def parse_parts(rows: object) -> tuple[StoredPart, ...]:
    """The inverse of `parts_text` on decoded JSON; raises ValueError with the reason on anything odd."""
    if not isinstance(rows, list):
        raise ValueError("its parts are not a list")
    return tuple(_read_part(row) for row in rows)


def manifest_text(manifest: Manifest) -> str:
    """The text of manifest.json: a function of the values alone, closed by the SHA-256 of all that precedes it."""
    is_rng = [part.tensor.startswith("rng/") for part in manifest.parts]
    text = (
        f'{{\n"format": {MANIFEST_FORMAT},\n'
        f'"step": {_scalar(manifest.step)},\n'
        f'"cursor": {_scalar(manifest.cursor)},\n'
        f'"model": {json.dumps(manifest.model, sort_keys=True)},\n'
        f'"rng": {parts_text(part for part, rng in zip(manifest.parts, is_rng, strict=True) if rng)},\n'
        f'"parts": {parts_text(part for part, rng in zip(manifest.parts, is_rng, strict=True) if not rng)},\n'
    )
    return f'{text}"sha256": "{sha256(text.encode()).hexdigest()}"\n}}\n'


def parse_manifest(data: bytes) -> Manifest:
    """Read manifest.json; raises ValueError with the reason unless it is, byte for byte, as `manifest_text` writes
    it."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    if found.get("format") != MANIFEST_FORMAT:
        raise ValueError(
            f"its format is {str(found.get('format'))[:20]}, this version of plait reads {MANIFEST_FORMAT}"
        )
    try:
        step, cursor, model = found["step"]["value"], found["cursor"]["value"], found["model"]
        parts = sort_parts(parse_parts(found["rng"]) + parse_parts(found["parts"]))
    except (KeyError, TypeError):
        raise ValueError("a field is missing or has the wrong type") from None
    if type(step) is not int or type(cursor) is not int or not isinstance(model, dict):
        raise ValueError("step, cursor or model has the wrong type")
    manifest = Manifest(step=step, cursor=cursor, model=model, parts=parts)
    if manifest_text(manifest).encode() != data:
        raise ValueError("its text does not match its own SHA-256")
    check_cover(parts)
    return manifest


def check_cover(parts: Sequence[StoredPart]) -> None:
    """Raise ValueError unless the (sorted) parts of every tensor cover it exactly: no hole, no overlap."""
    for tensor, group in groupby(parts, key=lambda part: part.tensor):
        boxes = list(group)
        if len({(box.shape, box.dtype) for box in boxes}) > 1:
            raise ValueError(f"the parts of {tensor} disagree on its shape or type")
        if _overlap([box for box in boxes if prod(box.extent)]):
            raise ValueError(f"two parts of {tensor} overlap")
        if sum(prod(box.extent) for box in boxes) != prod(boxes[0].shape):
            raise ValueError(f"the parts of {tensor} leave a hole")


def _overlap(boxes: list[StoredPart]) -> bool:
    """Whether any two boxes share an element; sweeps along the dim that is cut most often."""
    if len(boxes) < 2 or not boxes[0].shape:
        return len(boxes) > 1
    dim = max(range(len(boxes[0].shape)), key=lambda dim: len({box.offset[dim] for box in boxes}))
    boxes = sorted(boxes, key=lambda box: box.offset[dim])
    for index, one in enumerate(boxes):
        for other in boxes[index + 1 :]:
            if other.offset[dim] >= one.offset[dim] + one.extent[dim]:
                break
            sides = zip(one.offset, one.extent, other.offset, other.extent, strict=True)
            if all(at < other_at + other_size and other_at < at + size for at, size, other_at, other_size in sides):
                return True
    return False


def _scalar(value: int) -> str:
    return json.dumps({"value": value, "sha256": sha256(str(value).encode()).hexdigest()})


def _read_part(row: object) -> StoredPart:
    if not isinstance(row, dict) or row.keys() != set(_FIELDS):
        raise ValueError("a part lacks a field or has one too many")
    texts = [row[name] for name in ("tensor", "dtype", "file", "key", "sha256")]
    sizes = [row[name] for name in ("shape", "offset", "extent")]
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(size, list) for size in sizes):
        raise ValueError("a part's field has the wrong type")
    if not all(type(number) is int and number >= 0 for size in (*sizes, [row["begin"]]) for number in size):
        raise ValueError("a part's shape, offset, extent or begin is not made of whole numbers")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    part = StoredPart(**values)
    if part.dtype not in ITEM_BYTES or not _FILE.fullmatch(part.file) or not _SHA256.fullmatch(part.sha256):
        raise ValueError(f"the type, file or SHA-256 of a part of {part.tensor[:80]!r} is not one that plait writes")
    if not len(part.shape) == len(part.offset) == len(part.extent) or any(
        offset + extent > size for size, offset, extent in zip(part.shape, part.offset, part.extent, strict=True)
    ):
        raise ValueError(f"a part of {part.tensor[:80]!r} does not lie inside its tensor")
    return part
