"""Kill, interrupt and damage a run, give the same command again: the end is that of a run that was left alone."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from plait.launch.values.job import STOP_IN_WORDS
from tests.end_to_end.command import STEPS, Place, ended, flip_bit, kill_group, wait_while_running


def assert_same_end(place: Place, name: str, reference: str) -> None:
    assert place.numbers(name) == place.numbers(reference)
    assert place.manifest(name) == place.manifest(reference)


MOMENTS = ("begun", "saved_once", "saving_again", "after_line_45")


@pytest.mark.parametrize(
    ("workers", "moments"),
    [
        (2, ("saved_once", "saving_again")),  # so many have a reference already
        pytest.param(1, ("after_line_45",), marks=pytest.mark.slow),
        pytest.param(3, MOMENTS, marks=pytest.mark.slow),
    ],
)
def test_kill_9_at_several_moments_changes_nothing(
    place: Place, reference: Callable[[int], str], workers: int, moments: tuple[str, ...]
) -> None:
    whole, name = reference(workers), f"killed-{workers}-{len(moments)}"
    folder = place.path(name)

    def begun() -> bool:
        return (folder / "plan.json").exists()

    def saved_once() -> bool:
        return bool(place.checkpoints(name))

    def saving_again() -> bool:
        return any(path.name > ".step-2" for path in (folder / "checkpoints").glob(".step-*.staging"))

    def after_line_45() -> bool:
        metrics = folder / "metrics.jsonl"
        return metrics.exists() and metrics.read_bytes().count(b'"loss"') > 45

    known = (begun, saved_once, saving_again, after_line_45)
    for moment in (one for one in known if one.__name__ in moments):
        process = place.start_training(name, f"layout.replicate={workers}")
        wait_while_running(moment, process)
        if moment is saved_once:
            process.kill()  # the command alone: its workers must see for themselves that it is gone
        else:
            kill_group(process, signal.SIGKILL)
        assert ended(process).code == -signal.SIGKILL
        place.assert_nobody_left()
    assert place.checkpoints(name)[-1] < STEPS
    last = place.train(name, f"layout.replicate={workers}")
    assert last.code == 0 and not last.err and "resume   from step-" in last.out
    assert_same_end(place, name, whole)
    assert not list((folder / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_run_by_onednn_goes_on_to_the_bit_and_its_receipt_says_so(place: Place) -> None:
    by_onednn = ("layout.replicate=2", "train.matmul_backend=onednn")
    whole = place.train("whole-onednn", *by_onednn, "--why")
    assert whole.code == 0 and "matrix products by oneDNN, as asked" in " ".join(whole.out.split())
    process = place.start_training("killed-onednn", *by_onednn)
    wait_while_running(lambda: bool(place.checkpoints("killed-onednn")), process)
    kill_group(process, signal.SIGKILL)
    assert ended(process).code == -signal.SIGKILL
    assert place.train("killed-onednn", *by_onednn).code == 0
    assert_same_end(place, "killed-onednn", "whole-onednn")
    plan, receipt = (
        json.loads((place.path("killed-onednn") / name).read_text()) for name in ("plan.json", "receipt.json")
    )
    assert plan["arithmetic"]["matmul_backend"] == receipt["matmul_backend"] == "onednn"
    assert receipt["matmul_flops"] > 1e8 and 0 < receipt["matmul_error"] < 1e-5


def newest(place: Place, name: str) -> int:
    return max(place.checkpoints(name), default=0)


@pytest.mark.slow
def test_a_stop_while_steps_are_timed_waits_for_no_step(place: Place, tmp_path: Path) -> None:
    """A step of this recipe takes half a minute, and with shares that are named it is timed as it is. SIGHUP comes
    when a terminal is closed."""
    long = ("train.batch_tokens=500K", "layout.shares=[20000,11250]", "train.budget=1 hour")
    process = place.start("train", "tiny.toml", "run.name=slow", *long, environment={"TMPDIR": str(tmp_path)})
    wait_while_running(lambda: bool(list(tmp_path.glob("plait-measure-*/rank-1.log"))), process)
    at = time.monotonic()
    kill_group(process, signal.SIGHUP)
    stopped = ended(process)
    assert time.monotonic() - at < 10
    assert (stopped.code, stopped.err) == (129, "")
    assert (
        "stopped by SIGHUP before training began; the same command starts it again\nnext     plait train "
        in stopped.out
    )
    place.assert_nobody_left()
    assert not place.path("slow").exists() and not list(tmp_path.glob("plait-*"))


@pytest.mark.slow
def test_a_dead_worker_and_signals_stop_cleanly_and_the_run_goes_on(
    place: Place, reference: Callable[[int], str]
) -> None:
    whole, name = reference(2), "stopped"

    process = place.start_training(name, "recover.mode=never")
    wait_while_running(lambda: newest(place, name) >= 10, process)
    victim = place.rank_process(name, 1)
    at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    dead = ended(process)
    assert time.monotonic() - at < 5
    assert dead.code == 1
    assert dead.sentence().startswith("rank 1 was killed by SIGKILL") and "run the same command again" in dead.err
    told = [json.loads(line) for line in (place.path(name) / "incidents.jsonl").read_text().splitlines()]
    assert [line["decision"] for line in told] == ["ended"]
    place.assert_nobody_left()

    process = place.start_training(name)
    wait_while_running(lambda: newest(place, name) >= 20, process)
    kill_group(process, signal.SIGINT)
    assert_stopped(place, name, process, 130)

    process = place.start_training(name)
    wait_while_running(lambda: newest(place, name) >= 35, process)
    process.terminate()  # as `timeout` does: its command, and then their group
    kill_group(process, signal.SIGTERM)
    step = assert_stopped(place, name, process, 143)

    damaged = place.path(name) / "checkpoints" / f"step-{step}" / "rank-00001.safetensors"
    flip_bit(damaged)
    moved = place.folder / "elsewhere.txt"
    moved.write_bytes((place.folder / "play.txt").read_bytes())
    last = place.train(name, f"data.files={moved}")
    assert last.code == 0 and not last.err
    assert "skipped  " in last.out and f"step-{step}/rank-00001.safetensors is damaged" in last.out
    assert_same_end(place, name, whole)


@pytest.mark.slow
def test_a_terminal_that_is_closed_stops_and_saves(place: Place) -> None:
    name, terminal = "hung-up", pty.openpty()
    process = place.start("train", "tiny.toml", f"run.name={name}", terminal=terminal[1])
    os.close(terminal[1])
    os.set_blocking(terminal[0], False)

    def saved_once() -> bool:
        with suppress(BlockingIOError):  # read, or the command waits until somebody does
            os.read(terminal[0], 1 << 16)
        return bool(place.checkpoints(name))

    wait_while_running(saved_once, process)
    os.close(terminal[0])
    assert ended(process).code == 129
    step = newest(place, name)
    assert step < STEPS and place.lines(name)[-1]["step"] == step
    place.assert_nobody_left()


@pytest.mark.slow
def test_a_run_whose_folder_is_moved_ends_and_goes_on_when_it_is_back(
    place: Place, reference: Callable[[int], str]
) -> None:
    whole, name = reference(2), "moved"
    process = place.start_training(name)
    wait_while_running(lambda: newest(place, name) >= 10, process)
    working = place.processes()  # they would be done with so few steps before a folder is moved
    for pid in working:
        os.kill(pid, signal.SIGSTOP)
    place.path(name).rename(place.path("elsewhere"))
    for pid in working:
        os.kill(pid, signal.SIGCONT)
    run = ended(process)
    assert run.code == 1 and run.sentence().startswith(f'"runs/{name}" was moved or deleted while its run worked')
    assert not place.path(name).exists()
    place.assert_nobody_left()
    place.path("elsewhere").rename(place.path(name))
    assert place.train(name).code == 0
    assert_same_end(place, name, whole)


def assert_stopped(place: Place, name: str, process: subprocess.Popen[str], code: int) -> int:
    """Stopped by a signal: saved at the step where it stood, said so, and left no process."""
    stopped = ended(process)
    assert stopped.code == code and not stopped.err
    by = "Ctrl-C" if code == 130 else "SIGTERM"
    assert f"stop     {by}: {STOP_IN_WORDS}; again quits without saving" in stopped.out
    step = newest(place, name)
    assert step < STEPS and place.lines(name)[-1]["step"] == step
    assert f"stopped after step {step} of {STEPS}, saved" in stopped.out
    assert stopped.out.splitlines()[-1].startswith(f"next     plait train tiny.toml run.name={name}")
    place.assert_nobody_left()
    return step


@pytest.mark.slow
def test_two_runs_in_one_folder_at_once(place: Place, reference: Callable[[int], str]) -> None:
    whole, name = reference(2), "both"
    first = place.start_training(name)
    wait_while_running((place.path(name) / ".lock").exists, first)
    second = place.train(name)
    assert second.code == 2
    assert second.sentence() == ('another plait is training in "runs/both"; wait for it, or choose another run.name')
    assert ended(first).code == 0
    assert_same_end(place, name, whole)


@pytest.mark.slow
def test_the_same_recipe_in_another_place_ends_the_same(
    place: Place, reference: Callable[[int], str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Place(tmp_path_factory.mktemp("other") / "with spaces" / "and äöü")
    run = other.train("another-name")
    assert run.code == 0 and "as made before" not in run.out
    assert other.numbers("another-name") == place.numbers(reference(2))
    assert other.manifest("another-name") == place.manifest(reference(2))
