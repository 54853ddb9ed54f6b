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
from contextlib import contextmanager
from pathlib import Path

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
"""Bytes that are read at a time, at most, beside the tensor that they go into; of packed numbers, once unpacked."""
PAGE_BYTES = 4096
_Block = tuple[slice, slice]
"""Rows and columns of a tensor in a file."""


@torch.no_grad()
def read_boxes(base: BaseModel, boxes: Iterable[tuple[str, Box, Tensor]]) -> None:
    """Fill each tensor with the box of the weight of that name, in the tensor's own precision; on any rank, without the
    others. A weight may have more rows than the model's: Note [new tokens]. Raises PlaitError where a file changed or
    cannot be read."""
    sizes = stored_sizes(base.shape)
    with _open_files() as open_file:
        for name, box, tensor in boxes:
            place, own = base.places[name], sizes[name]
            rows = max(0, min(box.extent[0], own[0] - box.offset[0]))
            old = Box(shape=own, offset=box.offset, extent=(rows, *box.extent[1:]))
            _fill_box(place, old, tensor[:rows], open_file)
            if rows < box.extent[0]:
                assert dims_of(name)[0] == "vocabulary", name
                mean = _mean_row(place, own, open_file)
                tensor[rows:] = mean.narrow(0, box.offset[1], box.extent[1])


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


def _fill_box(place: WeightPlace, box: Box, tensor: Tensor, open_file: _Opener) -> None:
    for block, target in blocks_of(place, box, tensor):
        if place.scales is None:
            numbers = _read(open_file(place.stored.file), place.stored, block)
        else:
            numbers = _read_packed(place.stored, place.scales, block, open_file)
        numbers = numbers.to(target.dtype) if numbers.dtype == torch.float64 else numbers
        _refuse_not_finite(numbers, place.stored)
        target.copy_(numbers)


def _refuse_not_finite(numbers: Tensor, stored: StoredTensor) -> None:
    """Raise PlaitError where a weight is NaN or infinite: nothing can be computed with it."""
    if torch.isfinite(numbers.sum(dtype=torch.float32)) or torch.isfinite(numbers).all():  # the sum is faster
        return
    what = "NaN" if torch.isnan(numbers).any() else "infinity"
    raise PlaitError(
        f"{stored.name} in {stored.file} holds {what}, which no model can compute with; download the "
        "file again, or take an earlier checkpoint of that model"
    )


def _mean_row(place: WeightPlace, sizes: tuple[int, ...], open_file: _Opener) -> Tensor:
    """The mean of a matrix' rows, [width] in float64."""
    rows, width = sizes
    total, at_once = np.zeros(width), max(1, READ_BYTES // (8 * width))
    for first in range(0, rows, at_once):
        part = torch.empty(min(at_once, rows - first), width, dtype=torch.float64)
        _fill_box(place, Box(shape=sizes, offset=(first, 0), extent=tuple(part.shape)), part, open_file)
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


def _read(file: int, stored: StoredTensor, block: _Block) -> Tensor:
    """The numbers of a block of a stored tensor, [rows, columns], in its own dtype: Note [what is read]."""
    rows, columns = block
    size, width = ITEM_SIZES[stored.dtype], stored.shape[-1]
    n_rows, n_columns = rows.stop - rows.start, columns.stop - columns.start
    row_bytes = width * size
    if n_columns == width or (width - n_columns) * size < PAGE_BYTES:
        whole = np.empty((n_rows, row_bytes), dtype=np.uint8)
        _fill(file, stored, whole.reshape(-1).data, rows.start * row_bytes)
        found = np.ascontiguousarray(whole[:, columns.start * size : columns.stop * size])
    else:
        found = np.empty((n_rows, n_columns * size), dtype=np.uint8)
        for row in range(n_rows):
            begin = (rows.start + row) * row_bytes + columns.start * size
            _fill(file, stored, found[row].data, begin)
    return torch.from_numpy(found).view(DTYPES[stored.dtype])[:: rows.step, :: columns.step]


def _read_packed(codes: StoredTensor, scales: StoredTensor, block: _Block, open_file: _Opener) -> Tensor:
    """The numbers of a block of a matrix whose numbers are packed."""
    rows, columns = block
    parts = []
    for one in (codes, scales):
        width = one.shape[-1]
        found = np.empty((rows.stop - rows.start, width), dtype=np.uint8)
        _fill(open_file(one.file), one, found.reshape(-1).data, rows.start * width)
        parts.append(torch.from_numpy(found[:: rows.step]))
    return unpacked(*parts)[:, columns]


def _fill(file: int, stored: StoredTensor, into: memoryview, begin: int) -> None:
    """Read as many bytes as `into` has, from byte `begin` of a tensor on."""
    done = 0
    while done < len(into):
        read = os.preadv(file, [into[done:]], stored.begin + begin + done)
        if not read:
            raise PlaitError(f"{stored.file} ends before {stored.name} does; was it changed? download it again")
        done += read


@contextmanager
def _open_files() -> Iterator[_Opener]:
    opener = _Opener({})
    try:
        yield opener
    finally:
        for handle in opener.handles.values():
            os.close(handle)


class _Opener:
    """Opens each file once."""

    def __init__(self, handles: dict[Path, int]) -> None:
        self.handles = handles

    def __call__(self, file: Path) -> int:
        if file not in self.handles:
            try:
                self.handles[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise PlaitError(f"{file} can no longer be read ({error.strerror}); was it moved?") from None
        return self.handles[file]
