"""Is what was measured at one pace of the processors told at another as it would have been?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest

from benchmarks.lab.cut import Turn
from benchmarks.lab.pace import Pace
from benchmarks.lab.slowdown import STEPS, picture
from benchmarks.lab.unequal import SEQUENCE, speeds_at
from plait.errors import RunFailed


def turn(seconds: float, pace: tuple[float, ...], processor_s: float = 0.0) -> Turn:
    return Turn(seconds=(seconds,), ended="finished", product_s=pace, processor_s=processor_s)


def test_what_was_computed_goes_with_the_pace_and_waiting_stays():
    slow = turn(3.0, (1.5, 1.5), processor_s=4.0)  # two seconds on each of two hosts, and one of waiting
    assert slow.at_pace(1.0).seconds == pytest.approx((1.0 + 2.0 / 1.5,))
    assert turn(3.0, (1.5, 1.5)).at_pace(1.0).seconds == pytest.approx((2.0,)), "a host alone only computes"
    for unknown in (turn(3.0, ()), turn(3.0, (0.0, 1.0))):
        assert unknown.at_pace(1.0) == unknown
    assert slow.at_pace(0.0) == slow, "a file from before the pace was looked at"


def test_hosts_alone_are_as_fast_as_their_processors_would_have_been():
    parts = [8, 2]
    before = [turn(2.0, (1.0, 1.0)), turn(1.0, (1.0, 1.0))]
    after = [turn(4.0, (2.0, 1.0)), turn(1.0, (2.0, 1.0))]
    speeds = speeds_at(turn(5.0, (1.0, 2.0)), [before, after], parts)
    assert speeds == pytest.approx([8 * SEQUENCE / 2.0, 2 * SEQUENCE / 1.0 / 2])
    with pytest.raises(RunFailed, match="pace was not seen"):
        speeds_at(turn(5.0, (1.0, 0.0)), [before, after], parts)


def test_the_pace_is_seen_while_it_is_watched(tmp_path: Path):
    begun = monotonic()
    pace = Pace([0], tmp_path)
    try:
        while not pace.product_s(0, begun, monotonic()):
            assert monotonic() - begun < 30, "nothing was written"
            sleep(0.1)
    finally:
        pace.end()
    assert 1e-6 < pace.product_s(0, begun, monotonic()) < 1.0
    assert pace.product_s(0, begun - 20, begun - 10) == 0.0


def test_a_watcher_ends_with_its_input(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.lab.pace", "0", str(tmp_path / "pace")],
        cwd=Path(__file__).parents[2], stdin=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0


def test_the_picture_of_a_slowdown_shows_both_runs():
    way = {"seconds": [1.0] * STEPS, "losses": [], "changes": [{"step": 61, "shares": [51, 13], "reason": "r"}]}
    line = {"undisturbed": way, "disturbed": way, "equal_tokens_per_s": 16384.0, "slowed_tokens_per_s": 8192.0}
    drawn = picture(line)
    assert drawn.count("<polyline") == 2 and "shares 51 + 13" in drawn
