"""Two hosts that are two Python programs, each with a `folder=` of its own, train as one host does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.command import Place, ended, kill_group, wait_while_running
from tests.end_to_end.pair import free_port, listens

LEAD = """
import json, plait
recipe = {
    "run": {"name": "both"},
    "data": {"files": "play.txt"},
    "model": {"layers": 2, "width": 32, "heads": 2, "vocabulary": 300},
    "train": {"sequence": 16, "batch_tokens": 112, "budget": "%s", "matmul_backend": "default"},
    "layout": {"replicate": 2, "shares": [4, 3]},
    "balance": {"every": "never"},
    "checkpoint": {"every": "10 steps"},
}
options = {"hosts": 2, "address": "127.0.0.1", "port": %d, "secret_file": "secret", "folder": "lead"}
receipt = plait.train(recipe, **options)
saved = [str(path) for path in plait.Run("both", folder="lead").checkpoints]
print(json.dumps([receipt.steps, receipt.world_size, saved]))
"""
JOIN = 'import plait; print(plait.join("127.0.0.1:%d", secret_file="secret", folder="guest"))'


@pytest.fixture
def programs(tmp_path: Path) -> Place:
    """A current folder that holds the text and the secret; runs/ and .plait/ belong into the folders in it."""
    place = Place(tmp_path / "programs")
    for name in ("lead", "guest"):
        (place.folder / name).mkdir()
    return place


def start_both(place: Place, budget: str) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    cores, port = sorted(os.sched_getaffinity(0)), free_port()
    halves = cores[: max(1, len(cores) // 2)], cores[-max(1, len(cores) // 2) :]
    lead = place.start(module=("-c", LEAD % (budget, port)), preexec_fn=lambda: os.sched_setaffinity(0, halves[0]))
    wait_while_running(lambda: listens(port), lead)
    guest = place.start(module=("-c", JOIN % port), preexec_fn=lambda: os.sched_setaffinity(0, halves[1]))
    return lead, guest


@pytest.mark.slow
def test_two_programs_train_in_folders_of_their_own(programs: Place) -> None:
    lead, guest = (ended(process) for process in start_both(programs, "20 steps"))
    assert (lead.code, guest.code, guest.out) == (0, 0, "None\n"), (lead, guest)
    checkpoints = programs.folder / "lead" / "runs" / "both" / "checkpoints"
    assert json.loads(lead.out) == [20, 2, [str(checkpoints / f"step-{step}") for step in (10, 20)]]
    guests = programs.folder / "guest" / "runs" / "both"
    assert (guests / "joined.json").exists() and not list((guests / "checkpoints").glob("step-*"))
    assert list((programs.folder / "guest" / ".plait").glob("received/data/*"))
    named = sorted(path.name for path in programs.folder.iterdir())
    assert named == ["guest", "lead", "play.txt", "secret", "tiny.toml"], "nothing beside the two folders"
    programs.assert_nobody_left()


@pytest.mark.slow
def test_a_stop_saves_and_both_calls_say_how_it_ended(programs: Place) -> None:
    lead, guest = start_both(programs, "4000 steps")
    saved = programs.folder / "lead" / "runs" / "both" / "checkpoints"
    wait_while_running(lambda: bool(list(saved.glob("step-*"))), lead)
    kill_group(lead, signal.SIGTERM)
    first, second = ended(lead), ended(guest)
    assert "plait.errors.Interrupted: stopped after step " in first.err and "the same call goes on" in first.err
    assert "plait.errors.Interrupted: stopped by SIGTERM" in second.err
    programs.assert_nobody_left()
