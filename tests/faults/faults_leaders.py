"""A4: the leading process, the process that starts workers, or an agent is killed. A13: signals at any moment."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from plait.checkpoint.store import newest_good
from tests.end_to_end.command import STEPS, Place, ended, wait_until, wait_while_running
from tests.end_to_end.pair import EVEN, Pair
from tests.faults.conftest import Results

LEADERS, SERVERS, AGENTS = 10, 5, 3
FASTER = ("--no-check",)
LONGER = 400
"""Steps of runs that get a signal: about half of their time, so that half of the signals meet them."""


@pytest.fixture(scope="module")
def whole(place: Place) -> str:
    """A run that nobody disturbed."""
    run = place.train("whole")
    assert run.code == 0 and not run.err, run
    return "whole"


def done_steps(place: Place, name: str) -> int:
    path = place.path(name) / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.exists() else 0


def assert_same_end(place: Place, name: str, whole: str, steps: int = STEPS) -> None:
    assert place.numbers(name) == place.numbers(whole)
    assert place.manifest(name, steps) == place.manifest(whole, steps)


def test_a4_a_killed_leader_leaves_no_orphan_and_the_same_command_goes_on(
    place: Place, whole: str, results: Results, seed: int
) -> None:
    dice, gone_after_s = random.Random(f"{seed} leaders"), list[float]()
    for number in range(LEADERS):
        name = f"a4-leader-{number}"
        process, after = place.start_training(name, *FASTER), dice.randrange(1, STEPS - 10)
        wait_while_running(lambda name=name, after=after: done_steps(place, name) >= after, process)
        killed_s = time.monotonic()
        process.kill()
        wait_until(lambda: not place.processes(), within_s=1)
        gone_after_s.append(time.monotonic() - killed_s)
        ended(process)
        assert place.train(name, *FASTER).code == 0
        assert_same_end(place, name, whole)
    results["A4 leader"] = {"killed": LEADERS, "equal": LEADERS, "all gone after s, most": max(gone_after_s)}


def test_a4_a_killed_fork_server_is_replaced(place: Place, whole: str, results: Results, seed: int) -> None:
    dice = random.Random(f"{seed} servers")
    for number in range(SERVERS):
        name = f"a4-server-{number}"
        process, after = place.start_training(name, *FASTER), dice.randrange(1, STEPS - 10)
        wait_while_running(lambda name=name, after=after: done_steps(place, name) >= after, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        server = next(int(pid) for pid in children if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(server, signal.SIGKILL)
        last = ended(process)
        assert last.code == 0 and not last.err, last
        assert_same_end(place, name, whole)
    results["A4 fork server"] = {"killed": SERVERS, "equal": SERVERS}


def test_a4_a_killed_agent_leaves_no_orphan_and_the_same_commands_go_on(
    place: Place, whole: str, results: Results, seed: int, tmp_path: Path
) -> None:
    by_itself = 0
    for number in range(AGENTS):
        pair = Pair(place, Place(tmp_path / f"other-{number}"), tmp_path / f"secret-{number}")
        name = f"a4-agent-{number}"
        lead, guest = pair.start(name, *EVEN)
        wait_while_running(lambda name=name: bool(place.checkpoints(name)), lead)
        guest.kill()
        wait_until(lambda pair=pair: not pair.other.processes(), within_s=1)
        first = ended(lead, within_s=60)
        ended(guest)
        by_itself += first.code == 0
        if first.code:
            assert "lost" in first.sentence(), first
            first, second = (ended(process) for process in pair.start(name, *EVEN))
            assert (first.code, second.code) == (0, 0), (first, second)
        assert_same_end(place, name, whole)
        pair.assert_nothing_left()
    results["A4 agent"] = {"killed": AGENTS, "equal": AGENTS, "went on by itself": by_itself}


def test_a13_a_signal_at_any_moment_leaves_a_durable_state_and_its_exit_code(
    place: Place, results: Results, seed: int, pytestconfig: pytest.Config
) -> None:
    dice, codes, moments = random.Random(f"{seed} signals"), Counter[str](), Counter[str]()
    whole, settings, began_s = "a13-whole", (f"train.budget={LONGER} steps", *FASTER), time.monotonic()
    assert place.train(whole, *settings).code == 0
    length_s, number = time.monotonic() - began_s, 0
    for draw in range(3 * pytestconfig.getoption("--signals")):
        if number == pytestconfig.getoption("--signals"):
            break
        name, slurm = f"a13-{draw}", dice.choice(("17", ""))
        sent, at_s = dice.choice((signal.SIGTERM, signal.SIGUSR1)), dice.uniform(0.0, length_s)
        process = place.start("train", "tiny.toml", f"run.name={name}", *settings, environment={"SLURM_JOB_ID": slurm})
        try:
            process.wait(at_s)
        except Exception:
            os.killpg(process.pid, sent)
        last = ended(process)
        if last.code == 0:  # it was over before the signal came
            continue
        number += 1
        begun = place.path(name).exists() and bool(place.checkpoints(name))
        if last.code == -sent:  # Python itself had not begun to listen, and nothing was there to save
            assert not place.path(name).exists()
        else:
            assert last.code == (75 if slurm else 143), (sent, at_s, last)
        codes[f"{sent.name} {'below Slurm' if slurm else 'alone'}: {last.code}"] += 1
        moments["after steps" if begun else "before the first step"] += 1
        if begun:
            found = newest_good(place.path(name) / "checkpoints")
            assert found is not None and not found.skipped and found.manifest.step == done_steps(place, name)
        if begun and number % 8 == 0:
            assert place.train(name, *settings).code == 0
            assert_same_end(place, name, whole, LONGER)
        place.assert_nobody_left()
    results["A13"] = {"signals": number, "exit codes": dict(sorted(codes.items())), "moments": dict(moments)}
    assert number == pytestconfig.getoption("--signals") and moments["after steps"]
