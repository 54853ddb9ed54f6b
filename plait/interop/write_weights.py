"""Writes weights as sharded safetensors under a family's own names, a block at a time: no whole model is in memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BufferedWriter
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.transfer import DTYPES
from plait.interop.base_model import stored_shape
from plait.interop.families import Family
from plait.interop.stored_names import StoredName, outputs_in, stored_name
from plait.interop.tensor_files import INDEX, ITEM_SIZES, WHOLE
from plait.model.names import expert_of
from plait.model.shape import ModelShape
from plait.model.weights import stored_sizes

WRITE_BYTES = 1 << 24
"""Bytes of a tensor that are in memory at a time, about."""
SHARD_BYTES = 5 * 10**9
"""Size of a file of weights, at most, but for a single larger tensor."""

ReadPart = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
"""(our name of a weight, offset, extent) to that rectangle of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTensor:
    """A tensor of the files, and the weights of ours that lie in it, one after the other along the dim of outputs."""

    name: str
    shape: tuple[int, ...]
    weights: tuple[str, ...]
    outputs: tuple[int, ...]
    """Those of each weight."""
    order: str
    every: int = 1
    """How far apart the outputs of a weight lie; 1: they stand one after the other."""
    experts: int = 1
    """Experts along the first dim, each of which has as many of the weights; 1: there is no such dim."""
    dtype: str = ""
    """Its own, where it is not that of the other tensors."""


def written_tensors(shape: ModelShape, family: Family) -> list[WrittenTensor]:
    """Every tensor of a model's files, in the order of the forward pass."""
    places: dict[str, list[tuple[str, StoredName]]] = {}
    sizes = stored_sizes(shape)
    for name in sizes:
        stored = stored_name(family.names, name)
        places.setdefault(stored.name, []).append((name, stored))
    found: list[WrittenTensor] = []
    for name, parts in places.items():
        parts.sort(key=lambda part: (_expert_in(*part), outputs_in(part[1], part[0], sizes)[0]))
        first, stored = parts[0]
        weights = tuple(own for own, _ in parts)
        of_one = stored_shape(stored, outputs_in(stored, first, sizes)[1], sizes[first])
        experts = shape.size_of("experts") if stored.by_expert == "first dim" else 1
        found.append(
            WrittenTensor(
                name=name,
                shape=(experts, *of_one) if experts > 1 else of_one,
                weights=weights,
                outputs=tuple(sizes[own][0] for own in weights),
                order=stored.order,
                every=stored.every,
                experts=experts,
                dtype=stored.dtype,
            )
        )
    return found


def _expert_in(name: str, stored: StoredName) -> int:
    """The expert of a weight within its tensor."""
    return (expert_of(name) or 0) if stored.by_expert == "first dim" else 0


def files_bytes(tensors: Sequence[WrittenTensor], dtype: str) -> int:
    """Bytes of all tensors together, headers aside, in a dtype of ITEM_SIZES."""
    return sum(prod(one.shape) * ITEM_SIZES[one.dtype or dtype] for one in tensors)


def write_weights(
    folder: Path, tensors: Sequence[WrittenTensor], dtype: str, read: ReadPart, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the files, and the index where there are several; raises OSError where the disk refuses. Blocks until it
    has them."""
    shards = _shards(tensors, dtype, shard_bytes)
    names = [f"model-{at:05d}-of-{len(shards):05d}.safetensors" for at in range(1, len(shards) + 1)]
    names = [WHOLE] if len(shards) == 1 else names
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as out:
            _write_shard(out, shard, dtype, read)
            out.flush()
            os.fsync(out.fileno())
    if len(shards) > 1:
        places = {one.name: name for name, shard in zip(names, shards, strict=True) for one in shard}
        sizes = {"total_parameters": sum(prod(one.shape) for one in tensors), "total_size": files_bytes(tensors, dtype)}
        text = json.dumps({"metadata": sizes, "weight_map": places}, indent=2, sort_keys=True)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def _shards(tensors: Sequence[WrittenTensor], dtype: str, most: int) -> list[list[WrittenTensor]]:
    shards: list[list[WrittenTensor]] = [[]]
    for one in tensors:
        if shards[-1] and files_bytes([*shards[-1], one], dtype) > most:
            shards.append([])
        shards[-1].append(one)
    return shards


def _write_shard(out: BufferedWriter, shard: Sequence[WrittenTensor], dtype: str, read: ReadPart) -> None:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for one in shard:
        begin, end = end, end + files_bytes([one], dtype)
        table[one.name] = {"dtype": one.dtype or dtype, "shape": one.shape, "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    for one in shard:
        for block in _blocks(one, read):
            numbers = block.to(DTYPES[one.dtype or dtype]).contiguous().view(-1).view(torch.uint8).numpy()
            out.write(numbers.data)


def _blocks(one: WrittenTensor, read: ReadPart) -> Iterator[Tensor]:
    """The tensor's rows in order, some at a time."""
    if one.experts > 1:
        each = len(one.weights) // one.experts
        for first in range(0, len(one.weights), each):
            own, outputs = one.weights[first : first + each], one.outputs[first : first + each]
            yield from _blocks(replace(one, shape=one.shape[1:], weights=own, outputs=outputs, experts=1), read)
        return
    if len(one.shape) == 1:
        yield _joined([read(name, (0,), (own,)) for name, own in zip(one.weights, one.outputs, strict=True)], one.every)
        return
    rows, columns = one.shape[0], one.shape[-1]
    at_once = max(1, WRITE_BYTES // (8 * columns))
    if one.order == "in out":  # our rows are its columns
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            parts = zip(one.weights, one.outputs, strict=True)
            yield _joined([read(name, (0, first), (own, count)).t() for name, own in parts], one.every)
        return
    for name, own in zip(one.weights, one.outputs, strict=True):
        for first in range(0, own, at_once):
            yield read(name, (first, 0), (min(at_once, own - first), columns))


def _joined(parts: Sequence[Tensor], every: int) -> Tensor:
    """The outputs of several weights along the last dim, one after the other, or by turns."""
    return torch.stack(list(parts), dim=-1).flatten(-2) if every > 1 else torch.cat(list(parts), dim=-1)
