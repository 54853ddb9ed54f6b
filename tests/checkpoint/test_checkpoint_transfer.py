"""Tensors come back bit for bit, however they were cut when written."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.checkpoint.manifest import Manifest
from plait.checkpoint.store import checkpoint_for, publish, staging_for, verify_checkpoint
from plait.checkpoint.transfer import DTYPES, TensorSlice, read_slice, read_tensor, share_out, whole_slice, write_rank
from plait.errors import PlaitError

Box = tuple[tuple[int, ...], tuple[int, ...]]


def save(folder: Path, ranks: list[dict[str, list[TensorSlice]]]) -> tuple[Path, Manifest]:
    for rank, tensors in enumerate(ranks):
        write_rank(staging_for(folder, 1), rank, tensors)
    final = checkpoint_for(folder, 1)
    publish(staging_for(folder, 1), final, step=1, cursor=0, model={}, world_size=len(ranks))
    return final, verify_checkpoint(final)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*raw)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A partition of `shape` into boxes by cuts that need not line up."""
    pieces: list[Box] = [(tuple(0 for _ in shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        offset, extent = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, extent[dim]))
        low, high = list(extent), list(extent)
        low[dim], high[dim] = cut, extent[dim] - cut
        start = list(offset)
        start[dim] += cut
        pieces += [(offset, tuple(low)), (tuple(start), tuple(high))]
    return pieces


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))]


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_rectangle_can_be_read_from_any_partition(quick_disk: Path, data: st.DataObject):
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    dtype = DTYPES[data.draw(st.sampled_from(sorted(DTYPES)))]
    tensor = torch.randint(0, 255, (*shape, 8), dtype=torch.uint8)[..., : dtype.itemsize].contiguous()
    tensor = (tensor % 2 if dtype == torch.bool else tensor).view(dtype).reshape(shape)
    world_size = data.draw(st.integers(1, 3))
    ranks: list[dict[str, list[TensorSlice]]] = [{"w": []} for _ in range(world_size)]
    for box in data.draw(boxes(shape)):
        rank = data.draw(st.integers(0, world_size - 1))
        ranks[rank]["w"].append(TensorSlice(tensor=cut(tensor, box), shape=shape, offset=box[0]))
    low = [data.draw(st.integers(0, size)) for size in shape]
    extent = [data.draw(st.integers(0, size - at)) for at, size in zip(low, shape, strict=True)]
    with tempfile.TemporaryDirectory(dir=quick_disk) as folder:
        path, manifest = save(Path(folder), ranks)
        assert same_bits(read_tensor(path, manifest, "w"), tensor)
        assert same_bits(read_slice(path, manifest, "w", low, extent), cut(tensor, (tuple(low), tuple(extent))))


def test_not_a_number_and_minus_zero_keep_their_bits(folder):
    bits = torch.tensor([0x7FC00001, -0x80000000, 0x7F800001, 1], dtype=torch.int32)
    path, manifest = save(folder, [{"w": [whole_slice(bits.view(torch.float32))]}])
    assert same_bits(read_tensor(path, manifest, "w").view(torch.int32), bits)


def test_strided_and_gradient_carrying_tensors_are_written_as_their_values(folder):
    weight = torch.nn.Parameter(torch.randn(5, 3))
    path, manifest = save(folder, [{"t": [whole_slice(weight.t())], "w": [whole_slice(weight)]}])
    assert same_bits(read_tensor(path, manifest, "t"), weight.detach().t().contiguous())
    assert not read_tensor(path, manifest, "w").requires_grad


def test_two_ways_to_cut_give_the_same_tensor(folder, tmp_path):
    tensor = torch.randn(8, 6)
    rows = [{"w": [TensorSlice(tensor=tensor[i : i + 2], shape=(8, 6), offset=(i, 0))]} for i in range(0, 8, 2)]
    columns = [{"w": [TensorSlice(tensor=tensor[:, i : i + 2], shape=(8, 6), offset=(0, i))]} for i in range(0, 6, 2)]
    one, other = save(folder, rows), save(tmp_path / "columns", columns)
    assert same_bits(read_tensor(*one, "w"), read_tensor(*other, "w"))


def test_a_tensor_that_is_not_there_is_named(folder):
    path, manifest = save(folder, [{"model/w": [whole_slice(torch.ones(2))]}])
    with pytest.raises(PlaitError, match="no tensor adam_m/w"):
        read_tensor(path, manifest, "adam_m/w")


def test_a_file_that_vanished_after_verifying_is_a_sentence(folder):
    path, manifest = save(folder, [{"model/w": [whole_slice(torch.ones(2))]}])
    (path / "rank-00000.safetensors").unlink()
    with pytest.raises(PlaitError, match=r"rank-00000.safetensors can no longer be read"):
        read_tensor(path, manifest, "model/w")


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.integers(0, 1000), max_size=30), st.integers(1, 6))
def test_replicas_share_the_writing_evenly_and_completely(sizes: dict[str, int], ranks: int):
    shares = share_out(sizes, ranks)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
    assert shares == share_out(dict(reversed(sizes.items())), ranks)
