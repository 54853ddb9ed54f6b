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

from tests.end_to_end.command import STEPS, Place, ended, flip_bit, wait_while_running
from tests.end_to_end.test_end_recovery import FASTER, assert_same_end, done_steps, fork_server, incidents, is_back

EVERY = "recover.state_every=3"


def damage_checkpoints(place: Place, name: str) -> list[int]:
    """Flip a bit in every checkpoint that is there: whoever reads one says so. Returns their steps."""
    damaged = []
    for path in (place.path(name) / "checkpoints").glob("step-*/rank-*.safetensors"):
        flip_bit(path)
        damaged.append(int(path.parent.name.removeprefix("step-")))
    return damaged


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
def test_damaged_checkpoints_are_not_even_looked_at(place: Place, reference: Callable[[int], str]) -> None:
    whole, name = reference(2), "unread-2"
    process = place.start_training(name, EVERY, *FASTER)
    wait_while_running(lambda: 20 in place.checkpoints(name), process)
    damaged = damage_checkpoints(place, name)
    os.kill(fork_server(process), signal.SIGKILL)
    last = ended(process)
    assert last.code == 0 and damaged and "skipped" not in last.out, last
    assert_same_end(place, name, whole)
    assert told(place, name)[0]["from_copies"]


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
    "replicate": ("layout.replicate=3",),
    "shard": ("layout.replicate=1", "layout.shard=2", "layout.shard_what=parameters"),
    "optimizer": ("layout.replicate=1", "layout.shard=2", "layout.shard_what=optimizer"),
    "tensor": ("layout.replicate=1", "layout.tensor=2"),
    "pipeline": ("layout.replicate=1", "layout.pipeline=2"),
    "context": ("layout.replicate=1", "layout.context=2"),
    "mixed": ("layout.replicate=2", "layout.tensor=2"),
    "experts": ("layout.replicate=2", "model.experts=4", "model.expert_balance=bias", "model.size=auto"),
}
RANKS = {"replicate": 3, "mixed": 4}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_goes_on_from_copies_to_the_same_bits(place: Place, layout: str) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    alone, name = f"alone-{layout}", f"copied-{layout}"
    assert place.train(alone, *LAYOUTS[layout]).code == 0
    process = place.start_training(name, *LAYOUTS[layout], EVERY, "checkpoint.every=never", *FASTER)
    for start in (2, 3):
        after_step = (start - 1) * 20 + dice.randrange(-10, 10)
        wait_while_running(lambda step=after_step: done_steps(place, name) > step, process)
        os.kill(place.rank_process(name, dice.randrange(RANKS.get(layout, 2))), signal.SIGKILL)
        wait_while_running(lambda start=start: is_back(place, name, start), process)
    last = ended(process)
    assert last.code == 0 and not last.err, last
    assert_same_end(place, name, alone)
    assert [line["from_copies"] for line in told(place, name)] == [True, True]
    assert all(line["steps_lost"] <= 3 for line in told(place, name))


@pytest.mark.slow
def test_a_drill_tells_that_few_steps_were_lost(place: Place) -> None:
    asked = ("drill", "tiny.toml", "run.name=few", "--kill", "1@25", "--kill", "0@40", EVERY, "--json", "few.json")
    found = place.run(*asked)
    assert found.code == 0, found
    report = json.loads((place.folder / "few.json").read_text())
    assert report["ok"] and report["final_equal"] == "bits"
    assert all(0 <= fault["steps_lost"] <= 3 for fault in report["faults"])
