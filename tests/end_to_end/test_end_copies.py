"""Copies of the state in memory: after a worker's death no checkpoint is read, few steps are lost, and no bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import STEPS, Place, ended, wait_while_running
from tests.end_to_end.conftest import LeftAlone
from tests.end_to_end.test_end_recovery import FASTER, assert_same_end, done_steps, incidents, is_back

EVERY = "recover.state_every=3"


def memory_of(process: subprocess.Popen[str]) -> Path:
    """The file in memory that holds the copies, by the supervisor's descriptor."""
    links = Path(f"/proc/{process.pid}/fd").iterdir()
    return next(link for link in links if "memfd:plait-state" in str(link.readlink()))


def told(place: Place, name: str) -> list[dict[str, Any]]:
    return [line for line in incidents(place, name) if "cause" in line]


@pytest.mark.slow
def test_after_a_death_no_checkpoint_is_read_and_few_steps_are_lost(
    place: Place, reference: Callable[[int], str]
) -> None:
    whole, name = reference(2), "copied-2"
    process = place.start_training(name, EVERY, "checkpoint.every=never", *FASTER)
    for start, after_step in ((2, 10), (3, 30)):
        wait_while_running(lambda step=after_step: done_steps(place, name) > step, process)
        os.kill(place.rank_process(name, 1), signal.SIGKILL)
        wait_while_running(lambda start=start: is_back(place, name, start), process)
    last = ended(process)
    assert last.code == 0 and not last.err, last
    assert_same_end(place, name, whole)
    first, second = told(place, name)
    for line, after_step in ((first, 10), (second, 30)):
        assert line["from_copies"] and line["resumed_from"] >= after_step - 3 and 0 <= line["steps_lost"] <= 3
    assert f"going on from step {first['resumed_from']} of {STEPS}, kept in memory" in last.out
    assert f"resume   from step {second['resumed_from']} of {STEPS}, kept in memory" in last.out
    receipt = json.loads((place.path(name) / "receipt.json").read_text())
    assert 1 <= receipt["copy_every_steps"] <= 4 and 0 < receipt["copy_share"] < 1
    place.assert_nobody_left()


@pytest.mark.slow
def test_copies_that_cannot_be_used_are_passed_over_and_said(place: Place, reference: Callable[[int], str]) -> None:
    whole, name = reference(2), "spoilt-2"
    process = place.start_training(name, "recover.state_every=1000", *FASTER)
    wait_while_running(lambda: done_steps(place, name) > 12, process)
    os.kill(process.pid, signal.SIGSTOP)  # so that it does not see the death before the copies are spoilt
    rank = place.rank_process(name, 1)
    os.kill(rank, signal.SIGKILL)
    with memory_of(process).open("r+b") as memory:
        for slot in range(3):  # the text that says which parts a copy of rank 1 has
            memory.seek((1 << 41) + (1 << 16) + slot * (1 << 38))
            memory.write(b"x" * 100)
    os.kill(process.pid, signal.SIGCONT)
    last = ended(process)
    assert last.code == 0, last
    assert_same_end(place, name, whole)
    assert (
        "memory   the copies in memory cannot be used" in last.out and "going on from the newest checkpoint" in last.out
    )
    assert f"resume   from step-{max(n for n in (10, 20, 30, 40, 50) if f'from step-{n} ' in last.out)} of" in last.out


LAYOUTS = {
    "optimizer": ("layout.replicate=1", "layout.shard=2", "layout.shard_what=optimizer"),
    "mixed": ("layout.replicate=2", "layout.tensor=2"),
}
"""Every other layout goes on from copies on two hosts, in test_end_hosts_layouts.py."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_goes_on_from_copies_to_the_same_bits(place: Place, left_alone: LeftAlone, layout: str) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    alone, name = left_alone(*LAYOUTS[layout]), f"copied-{layout}"
    process = place.start_training(name, *LAYOUTS[layout], EVERY, "checkpoint.every=never", *FASTER)
    for start in (2, 3):
        after_step = (start - 1) * 20 + dice.randrange(-10, 10)
        wait_while_running(lambda step=after_step: done_steps(place, name) > step, process)
        os.kill(place.rank_process(name, dice.randrange(4 if layout == "mixed" else 2)), signal.SIGKILL)
        wait_while_running(lambda start=start: is_back(place, name, start), process)
    last = ended(process)
    assert last.code == 0 and not last.err, last
    assert_same_end(place, name, alone)
    assert [line["from_copies"] for line in told(place, name)] == [True, True]
    assert all(line["steps_lost"] <= 3 for line in told(place, name))
