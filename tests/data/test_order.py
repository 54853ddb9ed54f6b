from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.index import SourceEntry
from plait.data.order import longest_window, make_order, permuted_indices
from plait.data.shards import Corpus, Shard
from plait.errors import PlaitError


def corpus(*sizes: int, sources: tuple[int, ...] | None = None, weights: tuple[float, ...] = ()) -> Corpus:
    """A corpus in memory whose tokens are their own positions."""
    owners = sources or (0,) * len(sizes)
    none = np.zeros(1, dtype=np.int64)
    shards = [Shard(source=o, tokens=np.arange(n), starts=none) for o, n in zip(owners, sizes, strict=True)]
    return Corpus(
        folder=Path(),
        vocabulary=10,
        eot=0,
        dtype=np.dtype("<u2"),
        train=tuple(shards),
        heldout=(),
        train_bytes=0,
        heldout_bytes=0,
        weights=weights,
        sources=tuple(SourceEntry(path=f"file-{n}.txt", weight=None) for n in range(max(owners) + 1)),
        content_hash="",
        entries=(),
    )


def pairs(order, first: int, count: int) -> list[tuple[int, int]]:
    shard, start = order.windows(np.arange(first, first + count))
    return list(zip(shard.tolist(), start.tolist(), strict=True))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_a_permutation_reaches_every_number_once(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permuted_indices(np.arange(size), size, key)), np.arange(size))


def test_a_permutation_of_a_huge_range_needs_no_table() -> None:
    size = 10**15 + 7
    index = np.arange(0, size, size // 1000)
    found = permuted_indices(index, size, 5)
    assert len(np.unique(found)) == len(index) and found.min() >= 0 and found.max() < size


@pytest.mark.parametrize("key", range(5))
def test_a_permutation_looks_like_chance(key: int) -> None:
    size = 10_000
    found = permuted_indices(np.arange(size), size, key)
    # Each thousand positions in turn takes about a hundred windows of each tenth: chi-square, 90 degrees of freedom.
    table = np.histogram2d(np.arange(size), found, bins=10)[0]
    assert 45 < ((table - 100) ** 2 / 100).sum() < 150
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.04
    assert np.count_nonzero(np.diff(found) == 1) < 12, "neighbours stay neighbours"
    assert np.count_nonzero(found == np.arange(size)) < 12
    assert 0.45 < np.mean((found[:-1] ^ found[1:]) & 1) < 0.55, "the last bit alternates or stays"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(6, 200), min_size=1, max_size=5), st.integers(0, 9), st.integers(1, 5), st.integers(0, 3))
def test_an_epoch_reads_disjoint_windows_and_all_of_them(
    sizes: list[int], seed: int, sequence: int, epoch: int
) -> None:
    order = make_order(corpus(*sizes), seed, sequence)
    count = sum((size - 1) // sequence for size in sizes)
    found = pairs(order, epoch * count, count)
    targets = [(shard, start + n) for shard, start in found for n in range(1, sequence + 1)]
    assert len(set(targets)) == len(targets) == count * sequence
    assert all(start >= 0 and start + sequence < sizes[shard] for shard, start in found)
    assert order.epoch((epoch + 1) * count) == epoch + 1


def test_seed_and_epoch_change_the_order_and_the_phase() -> None:
    data = corpus(1009, 517)
    first, again, other = make_order(data, 1, 8), make_order(data, 1, 8), make_order(data, 2, 8)
    count = 126 + 64
    assert pairs(first, 0, count) == pairs(again, 0, count)

    def windows(order, epoch: int) -> list[tuple[int, int]]:
        return [(shard, start // 8) for shard, start in pairs(order, epoch * count, count)]

    assert windows(first, 0) != windows(other, 0)
    assert windows(first, 0) != windows(first, 1)
    assert sorted(windows(first, 0)) == sorted(windows(first, 1)) == sorted(windows(other, 0))
    phases = {start % 8 for epoch in range(40) for shard, start in pairs(first, epoch * count, count) if shard == 1}
    assert phases == {0, 1, 2, 3, 4}, "516 = 64 x 8 + 4: each of the five phases, and no other, comes up"


def test_over_the_epochs_every_token_is_a_target() -> None:
    sizes = (30, 13, 47)
    order = make_order(corpus(*sizes), 3, 8)
    count = 3 + 1 + 5
    seen = {(shard, start + n) for shard, start in pairs(order, 0, 100 * count) for n in range(1, 9)}
    assert seen == {(shard, n) for shard, size in enumerate(sizes) for n in range(1, size)}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 5000), st.lists(st.integers(0, 30), min_size=1, max_size=6), st.booleans())
def test_any_split_of_a_step_and_any_restart_reads_the_same(first: int, shares: list[int], weighted: bool) -> None:
    data = corpus(300, 200, 77, sources=(0, 0, 1), weights=(3.0, 1.0) if weighted else ())
    order = make_order(data, 7, 6)
    whole = pairs(order, first, sum(shares))
    edges = np.cumsum([0, *shares])
    assert [pair for n, share in enumerate(shares) for pair in pairs(order, first + int(edges[n]), share)] == whole
    backwards = order.windows(np.arange(first, first + sum(shares))[::-1])
    assert list(zip(backwards[0].tolist(), backwards[1].tolist(), strict=True)) == whole[::-1]


@pytest.mark.parametrize(
    ("weights", "length", "counts"),
    [((1.0, 2.0), 1002, (334, 668)), ((0.7, 0.2, 0.1), 1000, (700, 200, 100)), ((5.0, 5.0), 1000, (500, 500))],
)
def test_weights_are_kept_exactly_and_shuffled(
    weights: tuple[float, ...], length: int, counts: tuple[int, ...]
) -> None:
    sizes = tuple(4000 - 900 * n for n in range(len(weights)))
    order = make_order(corpus(*sizes, sources=tuple(range(len(weights))), weights=weights), 1, 4)
    for turn in range(3):
        shard, _ = order.windows(np.arange(turn * length, (turn + 1) * length))
        assert np.bincount(shard).tolist() == list(counts)
    runs = np.count_nonzero(np.diff(order.windows(np.arange(length))[0])) + 1
    expected = length * (1 - sum((count / length) ** 2 for count in counts))
    assert 0.8 * expected < runs < 1.2 * expected


@pytest.mark.slow
def test_odd_weights_are_kept_to_one_slot_in_sixty_thousand() -> None:
    weights = (0.123456789, 0.3, 1.7)
    order = make_order(corpus(50, 60, 70, sources=(0, 1, 2), weights=weights), 1, 4)
    shares = np.bincount(order.windows(np.arange(1 << 16))[0]) / (1 << 16)
    assert np.allclose(shares, np.array(weights) / sum(weights), atol=2 / (1 << 16))


def test_with_weights_each_source_goes_through_all_its_windows_in_turn() -> None:
    order = make_order(corpus(401, 81, sources=(0, 1), weights=(1.0, 1.0)), 1, 4)
    small = [pair for pair in pairs(order, 0, 4000) if pair[0] == 1]
    for epoch in range(10):
        assert len(set(small[epoch * 20 : epoch * 20 + 20])) == 20


def test_a_sequence_longer_than_the_data_is_told(make_corpus: Callable[..., Corpus]) -> None:
    sentence = r"sequence 100 is longer than the data allow \(90 training tokens\); choose at most 49"
    with pytest.raises(PlaitError, match=sentence):
        make_order(corpus(40, 50), 1, 100)
    with pytest.raises(PlaitError, match=r"\(50 training tokens\); choose at most 49"):
        make_order(corpus(400, 50, sources=(0, 1), weights=(1.0, 1.0)), 1, 100)
    make_order(corpus(50), 1, 49)
    with pytest.raises(PlaitError, match="choose at most 49"):
        make_order(corpus(50), 1, 50)


def test_a_weighted_source_that_is_all_held_out_is_told() -> None:
    data = corpus(400, 400, sources=(0, 2), weights=(1.0, 1.0, 1.0))
    data = replace(data, sources=tuple(SourceEntry(path=f"{name}.txt", weight=None) for name in "abc"))
    for asked in (lambda: make_order(data, 1, 4), lambda: longest_window(data)):
        with pytest.raises(PlaitError, match=r"all of b.txt is held out; give it more text"):
            asked()


def test_the_longest_window_is_one_that_an_order_can_be_made_of() -> None:
    together, apart = corpus(400, 50), corpus(400, 30, 50, sources=(0, 1, 1), weights=(9.0, 1.0))
    assert (longest_window(together), longest_window(apart)) == (399, 49)
    for data in (together, apart):
        make_order(data, 1, longest_window(data))
        with pytest.raises(PlaitError, match="longer than the data allow"):
            make_order(data, 1, longest_window(data) + 1)
