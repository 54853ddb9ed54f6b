"""A run that loses workers goes on by itself, and ends with the bits of one that was left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import STEPS, Place, ended, flip_bit, wait_while_running

FASTER = ("--no-check",)


def incidents(place: Place, name: str) -> list[dict[str, Any]]:
    path = place.path(name) / "incidents.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last may be half written
    return [json.loads(line) for line in lines]


def assert_same_end(place: Place, name: str, reference: str) -> None:
    assert place.numbers(name) == place.numbers(reference)
    assert place.manifest(name) == place.manifest(reference)


def is_back(place: Place, name: str, generation: int) -> bool:
    return any("back_after_s" in line and line["generation"] == generation for line in incidents(place, name))


def done_steps(place: Place, name: str) -> int:
    path = place.path(name) / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.exists() else 0


def damage_checkpoints(place: Place, name: str) -> list[int]:
    """Flip a bit in every checkpoint that is there: whoever reads one says so. Returns their steps."""
    damaged = []
    for path in (place.path(name) / "checkpoints").glob("step-*/rank-*.safetensors"):
        flip_bit(path)
        damaged.append(int(path.parent.name.removeprefix("step-")))
    return damaged


def fork_server(process: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.slow
def test_killed_ranks_and_a_killed_fork_server_change_nothing(place: Place, reference: Callable[[int], str]) -> None:
    """The last failure is gone on from in memory: the checkpoints, which are damaged by then, are not even read."""
    whole, name = reference(3), "recovers-3"
    process = place.start_training(name, "layout.replicate=3", "recover.state_every=3", *FASTER)
    for starts, (rank, after_step) in enumerate(((1, 12), (0, 23)), start=2):
        wait_while_running(lambda step=after_step: done_steps(place, name) > step, process)
        os.kill(place.rank_process(name, rank), signal.SIGKILL)
        wait_while_running(lambda start=starts: is_back(place, name, start), process)
    wait_while_running(lambda: max(place.checkpoints(name), default=0) > 30, process)
    damaged = damage_checkpoints(place, name)
    wait_while_running(lambda: done_steps(place, name) > max(damaged) + 3, process)  # a copy is newer then
    os.kill(fork_server(process), signal.SIGKILL)
    last = ended(process)
    assert last.code == 0 and not last.err and damaged and "skipped" not in last.out, last
    assert_same_end(place, name, whole)
    told = [line for line in incidents(place, name) if "cause" in line]
    assert [line["cause"] for line in told] == ["killed", "killed", "no answer"]
    assert [line["rank"] for line in told] == [1, 0, None]
    assert [line["generation"] for line in told] == [1, 2, 3] and told[2]["from_copies"]
    assert all(line["decision"] == "started again" for line in told)
    assert last.out.count("\nfailure  ") == 3
    assert "failure  rank 1 was killed by SIGKILL; going on from step" in last.out
    receipt = json.loads((place.path(name) / "receipt.json").read_text())
    assert receipt["incidents"] == [line["sentence"] for line in told] and 0 < receipt["useful_share"] <= 1
    place.assert_nobody_left()


def test_status_says_where_the_time_went_and_which_samples_each_step_took(
    place: Place, reference: Callable[[int], str]
) -> None:
    name = "told"
    process = place.start_training(name, *FASTER)
    wait_while_running(lambda: done_steps(place, name) > 13, process)
    os.kill(place.rank_process(name, 1), signal.SIGKILL)
    assert ended(process).code == 0
    assert_same_end(place, name, reference(2))
    found = place.run("status", name, "--json", "--ledger")
    assert found.code == 0, found
    status = json.loads(found.out)
    assert (status["state"], status["step"], status["steps"], status["starts"]) == ("finished", STEPS, STEPS, 2)
    assert status["samples_lost"] == status["samples_repeated"] == 0
    assert status["checked_checkpoints"] == place.checkpoints(name)
    assert abs(sum(status["seconds"].values()) - status["wall_s"]) < 1e-6
    assert 0 < status["useful_share"] < 1 and status["seconds"]["failures"] > 0
    (incident,) = status["incidents"]
    assert incident["steps_lost"] == incident["step"] - incident["resumed_from"] >= 0
    assert [(line["first"], line["last"]) for line in status["ledger"]] == [(7 * n, 7 * n + 6) for n in range(STEPS)]
    assert {line["tokens"] for line in status["ledger"]} == {112}
    text = place.run("status", name)
    assert text.code == 0 and "2 starts, 1 failure" in text.out and "samples  none lost, none counted twice" in text.out
    assert place.run("status", name, "--ledger").out.splitlines()[2] == "1\t0\t6\t112\t1"
    taken_again = incident["resumed_from"] + 1
    assert [line["generation"] for line in status["ledger"]] == [1 + (n >= taken_again) for n in range(1, STEPS + 1)]
    assert status["samples_skipped"] == 0 and status["lost_by_cause"].keys() == {"killed"}


@pytest.mark.slow
def test_failures_without_a_new_checkpoint_end_the_run_with_93(place: Place) -> None:
    name = "crashes"
    never_saved = ("checkpoint.every=never", "recover.state_every=never", "train.budget=4000 steps")
    process = place.start_training(name, *never_saved, "recover.give_up_after=2", *FASTER)
    wait_while_running(lambda: done_steps(place, name) > 1, process)
    os.kill(place.rank_process(name, 1), signal.SIGKILL)
    wait_while_running(lambda: is_back(place, name, 2), process)
    os.kill(place.rank_process(name, 1), signal.SIGKILL)
    last = ended(process)
    assert last.code == 93
    sentence = last.sentence()
    assert sentence.startswith("gave up after 2 failures without a new checkpoint: the last was that rank 1 was killed")
    assert [line["decision"] for line in incidents(place, name) if "cause" in line] == ["started again", "gave up"]
    place.assert_nobody_left()


@pytest.mark.slow
def test_what_the_user_can_mend_is_not_tried_again(place: Place) -> None:
    last = place.train("diverges", "optimizer.lr=1e9", "optimizer.clip=never", *FASTER)
    assert last.code == 1 and "diverged" in last.sentence()
    told = [line for line in incidents(place, "diverges") if "cause" in line]
    assert [line["cause"] for line in told] == ["numbers"] * (len(told) - 1) + ["raised"]
    assert [line["decision"] for line in told] == ["started again"] * (len(told) - 1) + ["ended"]
    assert len(told) == 4 and {line["bad_step"] for line in told[:3]} == {told[0]["bad_step"]}
    assert [line["skipped_first"] is not None for line in told] == [False, True, False, False]
    never = place.train("diverges-at-once", "optimizer.lr=1e9", "optimizer.clip=never", "recover.mode=never", *FASTER)
    assert never.code == 1 and never.sentence() == last.sentence()
    assert [line["decision"] for line in incidents(place, "diverges-at-once")] == ["ended"]


@pytest.mark.slow
def test_a_scheduler_is_told_to_queue_a_saved_run_again(place: Place) -> None:
    """The other signals' exit codes are in tests/commands/test_commands_interrupted.py."""
    name = "queued"
    asked = ("train", "tiny.toml", f"run.name={name}", "train.budget=4000 steps", *FASTER)
    process = place.start(*asked, environment={"SLURM_JOB_ID": "17"})
    wait_while_running(lambda: done_steps(place, name) > 2, process)
    os.killpg(process.pid, signal.SIGUSR1)
    last = ended(process)
    assert last.code == 75, last
    assert place.checkpoints(name)[-1] == done_steps(place, name)


@pytest.mark.slow
def test_numbers_that_are_bad_once_are_done_again_and_twice_at_a_step_have_their_samples_skipped(place: Place) -> None:
    asked = ("--nan", "1@19", "--nan", "1@25", "--nan", "1@25", "--nan", "1@45", "--json", "drill.json")
    found = place.run("drill", "tiny.toml", "run.name=bad", *asked)
    assert found.code == 1, found
    name, alone = "bad-drill", "bad-left-alone"
    told = [line for line in incidents(place, name) if "cause" in line]
    assert [(line["cause"], line["bad_step"]) for line in told] == [("numbers", step) for step in (19, 25, 25, 45)]
    assert told[0]["resumed_from"] == 10 and told[0]["skipped_first"] is None
    assert "failure  step 19 had loss nan; going on from step-10 of 60" in found.out
    assert place.numbers(name)[:24] == place.numbers(alone)[:24], "what was done again has the bits of the run alone"

    assert (told[2]["skipped_first"], told[2]["skipped_last"]) == (168, 174)
    assert "step 25 had loss nan a second time, so its samples 168 to 174 are skipped; going on from" in found.out
    ledger = json.loads(place.run("status", name, "--json", "--ledger").out)
    assert (ledger["samples_lost"], ledger["samples_repeated"], ledger["samples_skipped"]) == (0, 0, 7)
    firsts = [7 * n for n in range(STEPS + 1) if n != 24]
    assert [line["first"] for line in ledger["ledger"]] == firsts
    assert ledger["checked_checkpoints"] == place.checkpoints(name)
    assert "\nskipped\t168\t174\t0\t4\n25\t175\t181\t112\t4\n" in place.run("status", name, "--ledger").out
    report = json.loads((place.folder / "drill.json").read_text())
    assert report["samples_skipped"] == 7 and report["faults"][0]["steps_lost"] >= 8
    receipt = json.loads((place.path(name) / "receipt.json").read_text())
    assert receipt["samples_skipped"] == 7 and receipt["lost_by_cause"].keys() == {"numbers"}
