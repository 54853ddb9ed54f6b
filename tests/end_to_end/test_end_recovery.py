"""A run that loses workers goes on by itself, and ends with the bits of one that was left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import STEPS, Place, ended, wait_while_running

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


def kill_after(place: Place, name: str, rank: int, step: int, process: subprocess.Popen[str]) -> bool:
    """Kill a rank once the run has done so many steps; False where the run may have done its last one before.

    The rank is looked for beforehand, and only then is the step waited for: looking takes longer than many steps.
    """
    found: list[int] = []
    while not found or done_steps(place, name) < step:
        found = found or place.rank_processes(name, rank)
        if process.poll() is not None:
            return False
        threading.Event().wait(0.0005)
    try:
        os.kill(found[0], signal.SIGKILL)
    except ProcessLookupError:
        return False
    return done_steps(place, name) < STEPS


def fork_server(process: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.slow
def test_killed_ranks_and_a_killed_fork_server_change_nothing(place: Place, reference: Callable[[int], str]) -> None:
    whole, name = reference(3), "recovers-3"
    process = place.start_training(name, "layout.replicate=3", *FASTER)
    for starts, (rank, after_step) in enumerate(((1, 12), (0, 23)), start=2):
        wait_while_running(lambda step=after_step: done_steps(place, name) > step, process)
        os.kill(place.rank_process(name, rank), signal.SIGKILL)
        wait_while_running(lambda start=starts: is_back(place, name, start), process)
    wait_while_running(lambda: done_steps(place, name) > 41, process)
    os.kill(fork_server(process), signal.SIGKILL)
    last = ended(process)
    assert last.code == 0 and not last.err, last
    assert_same_end(place, name, whole)
    told = [line for line in incidents(place, name) if "cause" in line]
    assert [line["cause"] for line in told] == ["killed", "killed", "no answer"]
    assert [line["rank"] for line in told] == [1, 0, None]
    assert [line["generation"] for line in told] == [1, 2, 3]
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
def test_never_ends_the_run_as_before(place: Place) -> None:
    name = "never"
    process = place.start_training(name, "recover.mode=never", *FASTER)
    wait_while_running(lambda: done_steps(place, name) > 3, process)
    os.kill(place.rank_process(name, 1), signal.SIGKILL)
    last = ended(process)
    assert last.code == 1 and "run the same command again" in last.sentence()
    assert [line["decision"] for line in incidents(place, name)] == ["ended"]


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
@pytest.mark.parametrize(
    ("number", "slurm", "code"),
    [
        (signal.SIGUSR1, "17", 75),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in ((signal.SIGTERM, "17", 75), (signal.SIGUSR1, "", 143), (signal.SIGINT, "17", 130))
        ),
    ],
)
def test_a_scheduler_is_told_to_queue_a_saved_run_again(
    place: Place, number: signal.Signals, slurm: str, code: int
) -> None:
    name = f"queued-{number.name.lower()}-{slurm}"
    asked = ("train", "tiny.toml", f"run.name={name}", "train.budget=4000 steps", *FASTER)
    process = place.start(*asked, environment={"SLURM_JOB_ID": slurm})
    wait_while_running(lambda: done_steps(place, name) > 2, process)
    os.killpg(process.pid, number)
    last = ended(process)
    assert last.code == code, last
    assert place.checkpoints(name)[-1] == done_steps(place, name)


@pytest.mark.slow
def test_a_stopped_rank_is_found_named_and_survived(place: Place, reference: Callable[[int], str]) -> None:
    whole, name = reference(2), "stopped-2"
    process = place.start_training(name, *FASTER)
    wait_while_running(lambda: done_steps(place, name) > 25, process)
    os.kill(place.rank_process(name, 1), signal.SIGSTOP)
    last = ended(process)
    assert last.code == 0, last
    assert_same_end(place, name, whole)
    told = next(line for line in incidents(place, name) if "cause" in line)
    assert (told["cause"], told["rank"], told["what"]) == ("hung", 1, "stopped")
    assert "of step" in told["place"] and "plait/" in told["stack"] and 4 < told["found_after_s"] < 15
    place.assert_nobody_left()


LAYOUTS = {
    "replicate": ("layout.replicate=3",),
    "shard": ("layout.replicate=1", "layout.shard=2", "layout.shard_what=parameters"),
    "tensor": ("layout.replicate=1", "layout.tensor=2"),
    "pipeline": ("layout.replicate=1", "layout.pipeline=2"),
    "context": ("layout.replicate=1", "layout.context=2"),
    "mixed": ("layout.replicate=2", "layout.tensor=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kills_at_random_steps_change_nothing_under_any_layout(place: Place, layout: str) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    assert place.train(f"left-{layout}", *LAYOUTS[layout]).code == 0
    ranks = {"replicate": 3, "mixed": 4}.get(layout, 2)
    landed = 0
    for number in range(20):  # a run that ended before its kill proves nothing: another is drawn
        name = f"killed-{layout}-{number}"
        process = place.start_training(name, *LAYOUTS[layout], *FASTER)
        in_time = kill_after(place, name, dice.randrange(ranks), dice.randrange(1, STEPS - 5), process)
        last = ended(process)
        assert last.code == 0, last
        assert_same_end(place, name, f"left-{layout}")
        assert not in_time or sum("cause" in line for line in incidents(place, name)) == 1
        landed += in_time
        if landed == 4:
            return
    raise AssertionError(f"only {landed} of 20 kills came before the end of their run")


@pytest.mark.slow
def test_numbers_that_are_bad_once_are_done_again_and_twice_at_a_step_have_their_samples_skipped(place: Place) -> None:
    asked = ("drill", "tiny.toml", "--nan", "1@25", "--json", "drill.json")
    once = place.run(*asked, "run.name=once")
    assert once.code == 0, once
    report = json.loads((place.folder / "drill.json").read_text())
    assert report["ok"] and report["final_equal"] == "bits" and report["faults"][0]["steps_lost"] >= 5
    (told,) = (line for line in incidents(place, "once-drill") if "cause" in line)
    assert (told["cause"], told["bad_step"], told["resumed_from"]) == ("numbers", 25, 20)
    assert "failure  step 25 had loss nan; going on from step-20 of 60" in once.out

    twice = place.run(*asked, "--nan", "1@25", "--nan", "1@45", "run.name=twice")
    assert twice.code == 1, twice
    told = [line for line in incidents(place, "twice-drill") if "cause" in line]
    assert [line["bad_step"] for line in told] == [25, 25, 45]
    assert (told[1]["skipped_first"], told[1]["skipped_last"]) == (168, 174)
    assert "step 25 had loss nan a second time, so its samples 168 to 174 are skipped; going on from" in twice.out
    ledger = json.loads(place.run("status", "twice-drill", "--json", "--ledger").out)
    assert (ledger["samples_lost"], ledger["samples_repeated"], ledger["samples_skipped"]) == (0, 0, 7)
    firsts = [7 * n for n in range(STEPS + 1) if n != 24]
    assert [line["first"] for line in ledger["ledger"]] == firsts
    assert ledger["checked_checkpoints"] == place.checkpoints("twice-drill")
    assert "\nskipped\t168\t174\t0\t3\n25\t175\t181\t112\t3\n" in place.run("status", "twice-drill", "--ledger").out
    assert json.loads((place.folder / "drill.json").read_text())["samples_skipped"] == 7
    receipt = json.loads((place.path("twice-drill") / "receipt.json").read_text())
    assert receipt["samples_skipped"] == 7 and receipt["lost_by_cause"].keys() == {"numbers"}
