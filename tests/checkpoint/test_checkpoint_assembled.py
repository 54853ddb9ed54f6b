"""A checkpoint that is put together from copies of ranks' states in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait.checkpoint.arrival import part_files
from plait.checkpoint.assembled import BESIDE, PartsCopy, parse_copy, publish_copies
from plait.checkpoint.durable import NoRoom
from plait.checkpoint.manifest import parts_text
from plait.checkpoint.store import checkpoint_for, newest_good, staging_for
from plait.checkpoint.transfer import TensorSlice, rank_layout, read_tensor, whole_slice
from plait.errors import PlaitError, RunFailed

A, B = torch.arange(12.0).view(4, 3), torch.arange(5).to(torch.bfloat16)
TOKENS = torch.tensor([7])


def copy_of(rank: int, slices: Mapping[str, Sequence[TensorSlice]], position: int = 40) -> PartsCopy:
    """A copy as a rank leaves it in memory."""
    header, parts, local = rank_layout(rank, slices)
    data = header + b"".join(local[part.key].contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
    listed = parts_text(replace(part, sha256="0" * 64) for part in parts)
    text = f'{{"step": 9, "position": {position}, "parts": {listed}}}'.encode()
    return parse_copy(rank, text, len(data), lambda offset, nbytes: data[offset : offset + nbytes])


def rows(first: int, last: int) -> TensorSlice:
    return TensorSlice(tensor=A[first:last].clone(), shape=(4, 3), offset=(first, 0))


def published(folder: Path, copies: Sequence[PartsCopy], needs: Sequence[str] = ("a", "b")) -> None:
    folder.mkdir(exist_ok=True)
    places = staging_for(folder, 9, 3), checkpoint_for(folder, 9)
    publish_copies(copies, *places, step=9, model={"kind": "test"}, needs=needs)


def require_whole(folder: Path) -> None:
    found = newest_good(folder)
    assert found is not None and (found.manifest.step, found.manifest.cursor) == (9, 40)
    for name, wanted in (("a", A), ("b", B), ("tokens", TOKENS)):
        assert torch.equal(read_tensor(found.path, found.manifest, name), wanted), name


def test_a_replica_that_is_left_has_the_whole_state(tmp_path: Path) -> None:
    """Its own share of what all replicas write, and beside that what it holds as well; the others are gone."""
    left = {
        "a": [rows(0, 2)],
        "b": [whole_slice(B)],
        f"{BESIDE}a": [whole_slice(A)],
        f"{BESIDE}tokens": [whole_slice(TOKENS)],
    }
    published(tmp_path, [copy_of(2, left)])
    require_whole(tmp_path)


def test_stages_of_several_hosts_make_a_whole_state_each_part_once(tmp_path: Path) -> None:
    first = {"a": [rows(0, 2)], "tokens": [whole_slice(TOKENS)]}
    second = {"a": [rows(2, 4)], "b": [whole_slice(B)], f"{BESIDE}tokens": [whole_slice(TOKENS)]}
    published(tmp_path, [copy_of(0, first), copy_of(3, second), copy_of(4, second)])
    require_whole(tmp_path)
    assert not (tmp_path / "step-9" / part_files(2)[0]).exists(), "a copy of which nothing is needed makes no file"


NAN = TensorSlice(tensor=torch.tensor([1.0, float("nan")]), shape=(2,), offset=(0,))
BF16_INF = TensorSlice(tensor=torch.tensor([float("inf")]).to(torch.bfloat16), shape=(1,), offset=(0,))


@pytest.mark.parametrize(
    ("copies", "says"),
    [
        ([{"a": [rows(0, 2)], "b": [whole_slice(B)]}], "do not contain all of a"),
        ([{"a": [whole_slice(A)]}], "lack b"),
        ([{"a": [whole_slice(A)], "b": [NAN]}], "b has numbers .* not finite"),
        ([{"a": [whole_slice(A)], "b": [BF16_INF]}], "b has numbers .* not finite"),
    ],
)
def test_what_is_not_whole_becomes_no_checkpoint(
    tmp_path: Path, copies: Sequence[Mapping[str, Sequence[TensorSlice]]], says: str
) -> None:
    with pytest.raises(RunFailed, match=says):
        published(tmp_path, [copy_of(rank, one) for rank, one in enumerate(copies)])
    assert list(tmp_path.iterdir()) == [] and newest_good(tmp_path) is None


def test_copies_of_two_moments_are_not_mixed(tmp_path: Path) -> None:
    whole = {"a": [whole_slice(A)], "b": [whole_slice(B)]}
    with pytest.raises(RunFailed, match="different positions"):
        published(tmp_path, [copy_of(0, whole), copy_of(1, whole, position=48)])


def test_a_host_that_is_lost_meanwhile_leaves_nothing_behind(tmp_path: Path) -> None:
    def lost(offset: int, nbytes: int) -> bytes:
        raise PlaitError("b was lost")

    whole = copy_of(0, {"a": [whole_slice(A)], "b": [whole_slice(B)]})
    with pytest.raises(PlaitError, match="b was lost"):
        published(tmp_path, [replace(whole, read=lost)])
    assert newest_good(tmp_path) is None


@pytest.mark.parametrize("text", [b"[]", b"{}", b'{"position": -1, "parts": []}', b'{"position": 1, "parts": [{}]}'])
def test_a_text_that_no_rank_writes_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_copy(0, text, 100, lambda offset, nbytes: b"")


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, nbytes: int) -> None:
        raise NoRoom("full")

    monkeypatch.setattr("plait.checkpoint.assembled.require_space", full)
    with pytest.raises(NoRoom):
        published(tmp_path, [copy_of(0, {"a": [whole_slice(A)], "b": [whole_slice(B)]})])
