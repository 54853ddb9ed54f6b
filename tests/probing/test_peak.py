"""A processor's measured peak arithmetic rate."""

from __future__ import annotations

import pytest
import torch

from plait.probing import host_rank
from plait.probing.host_rank import MatmulRate, measure_matmul_flops


def test_a_try_during_which_others_had_the_processor_still_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rank, "TRY_S", -1.0)
    assert measure_matmul_flops(threads=1, most_s=0.0, size=8).flops > 0


def test_a_peak_that_was_measured_under_load_says_so() -> None:
    quiet, busy = MatmulRate(flops=1e11, granted=0.97), MatmulRate(flops=1e11, granted=0.4)
    assert quiet.doubt == ""
    assert "this process had 40% of its cores' time: it may be higher" in busy.doubt


def test_a_measured_peak_is_the_best_of_several_short_tries() -> None:
    rate = measure_matmul_flops(threads=1, size=256)
    assert rate.flops > 1e8
    assert 0 < rate.granted <= 1
    assert torch.get_num_threads() >= 1
