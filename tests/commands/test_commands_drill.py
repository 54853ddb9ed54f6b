"""What may be asked of a drill, and what a seed draws."""

from __future__ import annotations

import pytest

from plait.commands.drilling.faults import Fault, drawn_faults, parse_fault, require_possible
from plait.errors import PlaitError


def test_faults_are_named_by_rank_and_step() -> None:
    assert parse_fault("kill", "1@20") == Fault(kind="kill", rank=1, step=20)
    for odd in ("1", "@3", "1@", "a@b", "1@2@3", "-1@2", "1@ 2"):
        with pytest.raises(PlaitError, match=r'write it as "1@20"'):
            parse_fault("hang", odd)


def test_a_seed_draws_the_same_faults_and_another_seed_others() -> None:
    drawn = [drawn_faults(20, ranks=3, steps=50, step_s=0.1, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    require_possible(drawn[0], ranks=3, steps=50)
    assert {fault.rank for fault in drawn[0]} == {0, 1, 2} and {fault.kind for fault in drawn[0]} == {"kill", "hang"}
    assert [fault.step for fault in drawn[0]] == sorted(fault.step for fault in drawn[0])
    assert all(0 <= fault.after_s <= 0.1 for fault in drawn[0])


@pytest.mark.parametrize(
    ("faults", "sentence"),
    [
        ([], "a drill needs a failure"),
        ([Fault(kind="kill", rank=2, step=3)], "the run has ranks 0 to 1"),
        ([Fault(kind="kill", rank=1, step=60)], "the run has 60 steps; choose one from 1 to 59"),
    ],
)
def test_what_the_run_cannot_have_is_refused(faults: list[Fault], sentence: str) -> None:
    with pytest.raises(PlaitError, match=sentence):
        require_possible(faults, ranks=2, steps=60)
