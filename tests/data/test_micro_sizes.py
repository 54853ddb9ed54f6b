"""Sizes of micro-batches: everything once, never too much at a time, alike for those who meet."""

from __future__ import annotations

from itertools import product

from plait.data.micro_sizes import micro_sizes


def test_sizes_are_equal_the_larger_ones_first() -> None:
    assert micro_sizes((7,), (3,)) == ((3, 2, 2),)
    assert micro_sizes((6,), (3,)) == ((3, 3),)
    assert micro_sizes((1,), (3,)) == ((1,),)
    assert micro_sizes((0,), (3,)) == ((0,),)


def test_those_who_meet_take_equally_many_in_proportion() -> None:
    assert micro_sizes((11, 5), (4, 4)) == ((4, 4, 3), (2, 2, 1))
    assert micro_sizes((9, 2), (2, 2)) == ((2, 2, 2, 2, 1), (1, 1, 0, 0, 0))


def test_one_who_holds_little_makes_all_who_meet_take_more_of_smaller_ones() -> None:
    assert micro_sizes((8, 8), (8, 3)) == ((3, 3, 2), (3, 3, 2))
    assert micro_sizes((9, 3), (5, 1)) == ((3, 3, 3), (1, 1, 1))


def test_whatever_the_counts_all_is_taken_and_nothing_counts_twice() -> None:
    for counts in product(range(12), repeat=3):
        for limits in ((1, 1, 1), (2, 2, 2), (5, 2, 5), (20, 20, 1)):
            sizes = micro_sizes(counts, limits)
            assert tuple(map(sum, sizes)) == counts
            assert all(max(own) <= limit for own, limit in zip(sizes, limits, strict=True))
            assert len(set(map(len, sizes))) == 1
            for count, own in zip(counts, sizes, strict=True):
                assert (0 in own) == (count < len(own)), "a micro-batch is empty where there is nothing left for it"
