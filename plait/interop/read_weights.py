"""Rectangles of a model's weights, read straight into a rank's tensors: no bytes but their own, a block at a time.

Note [what is read]: a rectangle is read as the ranges of bytes that it consists of: one for whole rows, else one for
each row. Where the gaps between these are smaller than a page the disk reads them anyway, so whole rows are read.

Note [new tokens]: a run may have more tokens than the model that it goes on from. Their rows in the embedding and the
head begin as the mean of the model's own rows (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language
Models"): a row drawn at random may take most of the probability from the tokens that the model knows. The mean is
summed in float64, in one order, so that every layout has the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.checkpoint.transfer import DTYPES
from plait.errors import PlaitError
from plait.interop.base_model import BaseModel, WeightPlace
from plait.interop.mxfp4 import NUMBERS_BYTES, unpacked
from plait.interop.tensor_files import ITEM_SIZES, StoredTensor
from plait.model.gpt import GPT, kept_in, reset_kept_values
from plait.model.names import dims_of
from plait.model.shape import weight_sizes
from plait.model.weights import stored_sizes
from plait.partition.boxes import Box, whole_box

READ_BYTES = 1 << 24
"""Bytes that are read at a time, at most, unless a single row is longer; of packed numbers, once unpacked."""
PAGE_BYTES = 4096
_Block = tuple[slice, slice]
"""Rows and columns of a tensor in a file."""


@torch.no_grad()
def read_boxes(base: BaseModel, boxes: Iterable[tuple[str, Box, Tensor]]) -> None:
    """Fill each tensor with the box of the weight of that name, in the tensor's own precision; on any rank, without the
    others. A weight may have more rows than the model's: Note [new tokens]. Raises PlaitError where a file changed or
    cannot be read."""
    sizes = stored_sizes(base.shape)
    grown = list[tuple[str, Box, Tensor]]()

    def rows_of_the_model() -> Iterator[tuple[WeightPlace, Box, Tensor]]:
        for name, box, tensor in boxes:
            own = sizes[name]
            rows = max(0, min(box.extent[0], own[0] - box.offset[0]))
            if rows < box.extent[0]:
                assert dims_of(name)[0] == "vocabulary", name
                grown.append((name, box, tensor[rows:]))
            yield base.places[name], Box(shape=own, offset=box.offset, extent=(rows, *box.extent[1:])), tensor[:rows]

    with closing(_Reader()) as reader:
        reader.fill(rows_of_the_model())
        for name, box, new in grown:
            mean = _mean_row(base.places[name], sizes[name], reader)
            new[:] = mean.narrow(0, box.offset[1], box.extent[1])


def read_whole(base: BaseModel, name: str) -> Tensor:
    """All of a weight, in float32."""
    whole = torch.empty(weight_sizes(base.shape)[name])
    read_boxes(base, [(name, whole_box(whole.shape), whole)])
    return whole


def load_model_from(base: BaseModel, sequence: int, device: torch.device) -> GPT:
    """The whole model in one process, for sequences of up to this many tokens, in float32; its weights do not ask for
    gradients."""
    with torch.device("meta"):
        model = GPT(base.shape_for(sequence))
    model.to_empty(device=device)
    reset_kept_values(model)
    read_boxes(base, ((name, whole_box(one.shape), one) for name, one in file_tensors(model)))
    return model.eval()


def file_tensors(model: GPT) -> Iterator[tuple[str, Tensor]]:
    """All tensors that a whole model's files hold, by name: its weights, its routers' biases and its layers'
    multipliers."""
    yield from ((name, parameter.data) for name, parameter in model.named_parameters())
    yield from kept_in(model).items()


def _refuse_not_finite(numbers: Tensor, stored: StoredTensor) -> None:
    """Raise PlaitError where a weight is NaN or infinite: nothing can be computed with it."""
    smallest, largest = map(float, torch.aminmax(numbers))  # takes a twentieth of isfinite's time
    if isfinite(smallest) and isfinite(largest):
        return
    what = "NaN" if isnan(smallest) or isnan(largest) else "infinity"
    raise PlaitError(
        f"{stored.name} in {stored.file} holds {what}, which no model can compute with; download the "
        "file again, or take an earlier checkpoint of that model"
    )


def _mean_row(place: WeightPlace, sizes: tuple[int, ...], reader: _Reader) -> Tensor:
    """The mean of a matrix' rows, [width] in float64."""
    rows, width = sizes
    total, at_once = np.zeros(width), max(1, READ_BYTES // (8 * width))
    for first in range(0, rows, at_once):
        part = torch.empty(min(at_once, rows - first), width, dtype=torch.float64)
        reader.fill([(place, Box(shape=sizes, offset=(first, 0), extent=tuple(part.shape)), part)])
        total += part.numpy().sum(axis=0)
    return torch.from_numpy(total / rows)


def blocks_of(place: WeightPlace, box: Box, tensor: Tensor) -> Iterator[tuple[_Block, Tensor]]:
    """The box as blocks of the stored tensor, each with the view of `tensor` that its numbers belong in. A vector is
    read as a matrix of one row."""
    is_matrix = len(box.shape) == 2
    first, extent, every = list(box.offset), list(box.extent), [place.name.every, 1]
    first[0] = place.first + every[0] * first[0]
    own = tensor
    if not is_matrix:
        first, extent, every, own = [0, *first], [1, *extent], [1, *every], tensor.unsqueeze(0)
    elif place.name.order == "in out":
        first, extent, every, own = first[::-1], extent[::-1], every[::-1], tensor.t()
    if not extent[1]:
        return
    columns = slice(first[1], first[1] + every[1] * (extent[1] - 1) + 1, every[1])
    item_bytes = ITEM_SIZES[place.stored.dtype] if place.scales is None else NUMBERS_BYTES
    at_once = max(1, READ_BYTES // (every[0] * place.stored.shape[-1] * item_bytes))
    for begin in range(0, extent[0], at_once):
        end = min(begin + at_once, extent[0])
        rows = slice(first[0] + every[0] * begin, first[0] + every[0] * (end - 1) + 1, every[0])
        yield (rows, columns), own[begin:end]


class _Reader:
    """Reads blocks of stored tensors into the tensors that they belong in, while the next block comes from the disk.

    It has two buffers, so that a block costs no new memory. Used by one thread.
    """

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}
        self._buffers = [np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8)]
        self._ahead = ThreadPoolExecutor(1)

    def close(self) -> None:
        """Close the files; waits for a block that is being read."""
        self._ahead.shutdown()
        for handle in self._handles.values():
            os.close(handle)

    def fill(self, boxes: Iterable[tuple[WeightPlace, Box, Tensor]]) -> None:
        """Fill each tensor with the box of its stored tensor; raises PlaitError for what cannot be computed with."""
        work = ((place, *block) for place, box, tensor in boxes for block in blocks_of(place, box, tensor))
        if (current := next(work, None)) is None:
            return
        numbers, buffer = self._read(current[0], current[1], 0), 0
        for following in work:
            buffer = 1 - buffer
            coming = self._ahead.submit(self._read, following[0], following[1], buffer)
            _put(numbers, *current)
            numbers, current = coming.result(), following
        _put(numbers, *current)

    def _read(self, place: WeightPlace, block: _Block, buffer: int) -> tuple[Tensor, ...]:
        """The block as it is stored, [rows, columns], in its own dtype: Note [what is read]. Of packed numbers whole
        rows of codes and of scales. The buffer holds it."""
        rows, columns = block
        if place.scales is None:
            return (self._read_rows(place.stored, rows, columns, buffer),)
        packed, count = (place.stored, place.scales), rows.stop - rows.start
        room = self._room(buffer, count * sum(one.shape[-1] for one in packed))
        found, begin = list[Tensor](), 0
        for one in packed:
            width = one.shape[-1]
            part, begin = room[begin : begin + count * width], begin + count * width
            self._fill(one, part.data, rows.start * width)
            found.append(torch.from_numpy(part).view(count, width)[:: rows.step])
        return tuple(found)

    def _read_rows(self, stored: StoredTensor, rows: slice, columns: slice, buffer: int) -> Tensor:
        size, width = ITEM_SIZES[stored.dtype], stored.shape[-1]
        n_rows, n_columns = rows.stop - rows.start, columns.stop - columns.start
        whole_rows = (width - n_columns) * size < PAGE_BYTES
        kept = width if whole_rows else n_columns
        room = self._room(buffer, n_rows * kept * size)
        if whole_rows:
            self._fill(stored, room.data, rows.start * width * size)
        else:
            lines = room.reshape(n_rows, -1)
            for row in range(n_rows):
                self._fill(stored, lines[row].data, ((rows.start + row) * width + columns.start) * size)
        found = torch.from_numpy(room).view(DTYPES[stored.dtype]).view(n_rows, kept)[:: rows.step]
        return found[:, columns] if whole_rows else found[:, :: columns.step]

    def _room(self, buffer: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if len(self._buffers[buffer]) < nbytes:
            self._buffers[buffer] = np.empty(nbytes, dtype=np.uint8)
        return self._buffers[buffer][:nbytes]

    def _fill(self, stored: StoredTensor, into: memoryview, begin: int) -> None:
        """Read as many bytes as `into` has, from byte `begin` of a tensor on."""
        file, done = self._opened(stored.file), 0
        while done < len(into):
            read = os.preadv(file, [into[done:]], stored.begin + begin + done)
            if not read:
                raise PlaitError(f"{stored.file} ends before {stored.name} does; was it changed? download it again")
            done += read

    def _opened(self, file: Path) -> int:
        if file not in self._handles:
            try:
                self._handles[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise PlaitError(f"{file} can no longer be read ({error.strerror}); was it moved?") from None
        return self._handles[file]


def _put(parts: tuple[Tensor, ...], place: WeightPlace, block: _Block, target: Tensor) -> None:
    """Cast a block into its tensor; raises PlaitError where it is not finite."""
    numbers = parts[0] if place.scales is None else unpacked(*parts)[:, block[1]]
    numbers = numbers.to(target.dtype) if numbers.dtype == torch.float64 else numbers
    _refuse_not_finite(numbers, place.stored)
    target.copy_(numbers)
