"""What each host's ranks copy beside their own, so that the host has all that its ranks need."""

from __future__ import annotations

from plait.trainer.checkpointing.host_cover import PartPlace, covers, kept_beside

WHOLE: PartPlace = ("w", (0, 0), (4, 6))
UPPER: PartPlace = ("w", (0, 0), (2, 6))
LOWER: PartPlace = ("w", (2, 0), (2, 6))
OTHER: PartPlace = ("v", (0,), (10,))


def test_a_rectangle_is_there_as_a_part_of_one_or_as_several() -> None:
    assert covers(UPPER, [], [WHOLE]) and covers(WHOLE, [], [UPPER, LOWER]) and covers(WHOLE, [WHOLE], [UPPER])
    assert not covers(WHOLE, [], [UPPER]) and not covers(OTHER, [WHOLE], [WHOLE])
    assert not covers(WHOLE, [UPPER, UPPER], []), "two copies of a half are no whole"
    assert covers(("w", (0, 0), (0, 6)), [], []), "nothing is always there"


def test_what_ranks_of_the_host_own_is_not_copied_again() -> None:
    assert kept_beside([[UPPER], [LOWER]], [[WHOLE], [WHOLE]]) == [[], []]


def test_what_only_other_hosts_own_is_copied_once_by_who_has_least() -> None:
    assert kept_beside([[UPPER], []], [[WHOLE, OTHER], [WHOLE, OTHER]]) == [[OTHER], [WHOLE]]
    assert kept_beside([[]], [[OTHER, OTHER]]) == [[OTHER]]


def test_a_rank_copies_what_it_holds_itself() -> None:
    beside = kept_beside([[], []], [[UPPER], [OTHER]])
    assert beside == [[UPPER], [OTHER]]
