from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.balance import attention_pairs, balance_samples, counted_targets, order_by_load, window_lengths
from plait.data.order import make_order
from plait.data.packing import segment_lengths
from plait.data.shards import Corpus, Shard

SEQUENCE = 512
WITHIN = 0.03
"""So far apart may the parts' pairs a token be, the largest beside the smallest."""


def pairs_of(seed: int, count: int, *, typical: int) -> np.ndarray:
    """Windows over documents of 10 to 100,000 tokens, most about as long as `typical`."""
    draws = np.random.default_rng(seed)
    lengths = np.clip(draws.lognormal(np.log(typical), 1.5, 6 + 4 * count * SEQUENCE // typical), 10, 100_000)
    starts = np.concatenate([[0], np.cumsum(lengths.astype(np.int64))])
    shard = Shard(source=0, tokens=np.zeros(0, dtype="<u2"), starts=starts[:-1])
    windows = draws.integers(0, max(1, int(starts[-1]) - SEQUENCE), size=count)
    return attention_pairs((shard,), np.zeros(count, dtype=np.int64), windows, SEQUENCE)


def spread(pairs: np.ndarray, deal: list[np.ndarray]) -> float:
    means = [pairs[rows].mean() for rows in deal]
    return max(means) / min(means) - 1


def contiguous(parts: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(np.arange(sum(parts)), np.cumsum(parts)[:-1])


def plain(deal: list[np.ndarray]) -> list[list[int]]:
    return [rows.tolist() for rows in deal]


def test_pairs_of_windows_are_those_of_their_segments() -> None:
    draws = np.random.default_rng(3)
    shards = tuple(
        Shard(source=0, tokens=np.zeros(4000, dtype="<u2"), starts=np.unique(np.append(draws.integers(0, 3999, n), 0)))
        for n in (300, 0, 40)
    )
    shard, start = draws.integers(0, 3, 50), draws.integers(0, 3900, 50)
    found = attention_pairs(shards, shard, start, 64)
    for row in range(50):
        lengths = segment_lengths(shards, shard[row : row + 1], start[row : row + 1], 64)
        assert found[row] == sum(n * (n + 1) // 2 for n in lengths.tolist())


def test_lengths_of_windows_worked_out_by_hand() -> None:
    shard = Shard(source=0, tokens=np.zeros(20, dtype="<u2"), starts=np.array([0, 3, 7, 8]))
    lengths, first = window_lengths(shard, np.array([2, 7, 9]), 6)
    assert (lengths.tolist(), first.tolist()) == ([1, 4, 1, 1, 5, 6], [0, 3, 5])


def test_counted_targets_are_those_without_a_mark() -> None:
    mask = np.zeros(40, dtype=np.uint8)
    mask[[5, 6, 7, 20]] = 1
    starts = np.array([0])
    marked = Shard(source=0, tokens=np.zeros(40, dtype="<u2"), starts=starts, mask=mask)
    unmarked = Shard(source=0, tokens=np.zeros(40, dtype="<u2"), starts=starts)
    # The targets of a window from 5 are the tokens 6 to 15.
    found = counted_targets((marked, unmarked), np.array([0, 0, 1, 0]), np.array([5, 4, 5, 19]), 10)
    assert found.tolist() == [8, 7, 10, 9]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_sample_falls_to_one_part_and_each_part_gets_its_number(data: st.DataObject) -> None:
    parts = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=9)))
    load = st.lists(st.integers(1, 5000), min_size=sum(parts), max_size=sum(parts))
    pairs = np.array(data.draw(load), dtype=np.int64)
    counted = data.draw(st.one_of(st.none(), load.map(lambda values: np.array(values, dtype=np.int64))))
    deal = balance_samples(pairs, parts, counted)
    assert tuple(len(rows) for rows in deal) == parts
    assert sorted(np.concatenate(deal).tolist()) == list(range(sum(parts)))
    assert all((np.diff(rows) > 0).all() for rows in deal)
    assert plain(deal) == plain(balance_samples(pairs.copy(), parts, counted)), "the same question, another answer"
    order = order_by_load(pairs, deal[0], (parts[0],))
    assert order.tolist() == deal[0].tolist()


@pytest.mark.parametrize("parts", [(8,), (4, 4), (5, 2, 1), (1,) * 8])
def test_samples_that_are_alike_stay_in_their_order(parts: tuple[int, ...]) -> None:
    alike = np.full(8, 777)
    assert plain(balance_samples(alike, parts)) == plain(contiguous(parts))
    assert plain(balance_samples(alike, parts, np.full(8, 5))) == plain(contiguous(parts))
    assert order_by_load(alike, np.array([1, 3, 4, 7]), (2, 1, 1)).tolist() == [1, 3, 4, 7]


@pytest.mark.parametrize(
    "parts", [(128, 128), (192, 64), (64,) * 4, (96, 96, 32, 32), (32,) * 8, (24, 40, 50, 14, 32, 32, 60, 4)]
)
@pytest.mark.parametrize("typical", [60, 400])
def test_pairs_of_parts_are_within_three_percent(parts: tuple[int, ...], typical: int) -> None:
    before, after = [], []
    for seed in range(8):
        pairs = pairs_of(seed, sum(parts), typical=typical)
        before.append(spread(pairs, contiguous(parts)))
        after.append(spread(pairs, balance_samples(pairs, parts)))
    assert max(before) > WITHIN, "nothing to fix"
    assert max(after) <= WITHIN, f"{parts}: {max(after):.1%}, and {max(before):.0%} as they come"


def test_what_few_samples_allow_is_found() -> None:
    """Beside the best of all deals: where one keeps 3 %, so does ours, but for one time in fifty."""
    possible, kept, steps = 0, 0, 0
    for parts in ((6, 6), (9, 3), (3, 3, 3), (4, 2, 3), (1, 3, 5), (2, 2, 2, 2), (2, 2, 2)):
        ways = [np.array(way) for way in zip(*_all_deals(tuple(range(sum(parts))), parts), strict=True)]
        for seed in range(40):
            pairs = pairs_of(seed, sum(parts), typical=(30, 100, 300, 1000)[seed % 4])
            means = np.stack([pairs[way].mean(axis=1) for way in ways])
            possible += int((means.max(axis=0) / means.min(axis=0)).min() - 1 <= WITHIN)
            kept += int(spread(pairs, balance_samples(pairs, parts)) <= WITHIN)
            steps += 1
    print(f"of {steps} steps of 6 to 12 samples {possible} can be dealt within 3 %, and {kept} were")
    assert 0.98 * possible <= kept <= possible < steps


def test_counted_targets_come_second() -> None:
    draws = np.random.default_rng(5)
    pairs, counted = pairs_of(5, 128, typical=300), draws.integers(10, SEQUENCE, 128)
    parts = (64, 32, 32)
    alone, both = balance_samples(pairs, parts), balance_samples(pairs, parts, counted)
    assert spread(counted, contiguous(parts)) > 0.05
    assert spread(counted, both) <= WITHIN < spread(counted, alone)
    assert spread(pairs, both) <= 0.01


def test_micro_batches_are_evenly_heavy_and_the_rest_comes_heaviest_first() -> None:
    pairs = pairs_of(7, 256, typical=150)
    deal = balance_samples(pairs, (96, 96, 64))
    for rows in deal:
        sizes = (8,) * (len(rows) // 8)
        ordered = order_by_load(pairs, rows, sizes)
        assert sorted(ordered.tolist()) == rows.tolist()
        assert spread(pairs, np.split(ordered, len(sizes))) <= WITHIN < spread(pairs, np.split(rows, len(sizes)))
        single = pairs[order_by_load(pairs, rows, (1,) * len(rows))]
        assert (np.diff(single) <= 0).all()
    cuts = np.cumsum((5,) * 12)
    micros = np.split(order_by_load(pairs, deal[2], (5,) * 12 + (4,)), cuts)
    assert len(micros[-1]) == 4
    assert spread(pairs, micros) <= 0.05 < spread(pairs, np.split(deal[2], cuts))


def test_parts_of_one_sample_stay_as_they_come() -> None:
    pairs = pairs_of(1, 8, typical=60)
    assert plain(balance_samples(pairs, (1,) * 8)) == [[n] for n in range(8)]


def test_a_deal_is_the_one_that_earlier_versions_made() -> None:
    """Ranks of one run must agree whatever machines they are on: these numbers may change only on purpose."""
    pairs = np.array([((n * 37) % 101) ** 2 + 1 for n in range(24)])
    counted = np.array([5 + (n * 13) % 17 for n in range(24)])
    assert plain(balance_samples(pairs, (12, 8, 4), counted)) == [
        [0, 1, 2, 6, 9, 15, 16, 17, 18, 19, 21, 22],
        [3, 7, 8, 10, 11, 12, 13, 14],
        [4, 5, 20, 23],
    ]


def test_real_text_of_many_lengths(make_corpus: Callable[..., Corpus], text: str) -> None:
    """Plays cut into documents from a line to an act, through the order that training reads."""
    draws, documents, at = np.random.default_rng(2), [], 0
    while at < len(text):
        length = int(np.clip(draws.lognormal(6, 1.5), 30, 20_000))
        documents.append(text[at : at + length])
        at += length
    corpus = make_corpus(documents)
    order = make_order(corpus, 1, 64)
    before, after = [], []
    for step in range(6):
        shard, start = order.windows(np.arange(step * 64, step * 64 + 64))
        pairs = attention_pairs(corpus.train, shard, start, 64)
        deal = balance_samples(pairs, (48, 16))
        before.append(spread(pairs, contiguous((48, 16))))
        after.append(spread(pairs, deal))
    assert max(after) <= WITHIN < max(before)


def _all_deals(rest: tuple[int, ...], parts: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    if not parts:
        return [[]]
    return [
        [mine, *others]
        for mine in combinations(rest, parts[0])
        for others in _all_deals(tuple(n for n in rest if n not in mine), parts[1:])
    ]
