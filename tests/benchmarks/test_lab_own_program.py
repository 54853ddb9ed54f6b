"""A person's program on two hosts of the lab, one with less of a processor: it gets less of each batch."""

from __future__ import annotations

import pytest

from benchmarks.lab.hosts import Lab, require_root
from benchmarks.lab.own_program import SETTLING, WORK, HostTurn, host_turns, reached
from plait.errors import PlaitError

EXAMPLES = 14
CORES = (0.5, 0.2)
"""So little that other programs of this machine leave both hosts what they may take."""


def test_the_sum_of_speeds_is_taken_at_the_pace_of_the_turn() -> None:
    alone = [HostTurn(step_s=1.0, examples=20, product_s=2.0), HostTurn(step_s=2.0, examples=10, product_s=2.0)]
    slower = [HostTurn(step_s=1.25, examples=20, product_s=2.5), HostTurn(step_s=2.5, examples=10, product_s=2.5)]
    together = [HostTurn(step_s=2.0, examples=20, product_s=2.0), HostTurn(step_s=2.0, examples=10, product_s=2.0)]
    assert reached(together, [alone, slower]) == pytest.approx((30 / 2.0) / (20 + 5))


@pytest.mark.slow
def test_the_host_with_less_of_a_processor_gets_less_of_each_batch() -> None:
    try:
        require_root()
    except PlaitError as refusal:
        pytest.skip(str(refusal))
    WORK.mkdir(parents=True, exist_ok=True)
    with Lab(CORES, "unshaped", work=WORK, files="shared") as lab:
        fast, slow = host_turns(lab, "plait", [EXAMPLES, EXAMPLES], SETTLING + 2)
    assert fast.examples + slow.examples == EXAMPLES
    assert 9 <= fast.examples <= 11  # 10 of 14 are in the proportion of 1 : 0.4
