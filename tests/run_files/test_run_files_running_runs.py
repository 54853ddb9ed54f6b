"""Runs that train on this machine at the same time: found wherever they are, told what each gets."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from plait.run_files.running_runs import (
    RunningRun,
    listed_as_running,
    registry_folder,
    running_runs,
    sharing_lines,
)
from tests.end_to_end.command import Place, ended, kill_group, wait_while_running

ONE = RunningRun(folder="/a/runs/one", workers=2, threads=1, gpus=())
TWO = RunningRun(folder="/b/runs/two", workers=1, threads=2, gpus=())


def on_gpus(*gpus: int) -> RunningRun:
    return RunningRun(folder="/c/runs/three", workers=len(gpus), threads=4, gpus=gpus)


def test_a_run_is_listed_while_it_trains(tmp_path: Path) -> None:
    registry = tmp_path / "plait"
    assert running_runs(registry) == []
    with listed_as_running(ONE, registry):
        assert running_runs(registry) == [ONE]
    assert running_runs(registry) == [] and not list(registry.iterdir())


def test_what_a_killed_run_left_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('{"folder": "/x", "workers": 1, "threads": 1, "gpus": []}')
    assert running_runs(tmp_path) == [] and not list(tmp_path.iterdir())


def test_files_of_others_there_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{}")
    os.mkfifo(tmp_path / "7.json")
    (tmp_path / "8.json").symlink_to(tmp_path / "cluster.json")
    assert running_runs(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7.json", "8.json", "cluster.json"]


def test_a_registry_that_others_may_write_is_not_believed(tmp_path: Path) -> None:
    with listed_as_running(ONE, tmp_path):
        tmp_path.chmod(0o777)
        assert running_runs(tmp_path) == []
        with listed_as_running(TWO, tmp_path):
            tmp_path.chmod(0o700)
            assert running_runs(tmp_path) == [ONE]


def test_where_the_registry_is() -> None:
    assert registry_folder({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/plait")
    assert registry_folder({}).name == f"plait-{os.getuid()}"


@pytest.mark.parametrize(
    ("own", "others", "cores", "told"),
    [
        (ONE, [TWO], 2, "of 2 cores this run gets about 1 and the other 1: steps take about 2 times as long"),
        (ONE, [TWO], 4, "there are enough of the 4 cores for all of them"),
        (ONE, [TWO, TWO], 3, "of 3 cores this run gets about 1 and the other 1 and 1"),
        (on_gpus(0, 1), [on_gpus(1, 2)], 8, "GPU 1 is shared: each run gets about 1/2 of it"),
        (on_gpus(0), [on_gpus(1), ONE], 8, "they use other devices than this run"),
    ],
)
def test_what_each_gets(own: RunningRun, others: list[RunningRun], cores: int, told: str) -> None:
    first, second = sharing_lines(own, others, cores)
    assert first.startswith("this machine is training already: /") and all(other.folder in first for other in others)
    assert second.startswith(told)
    assert sharing_lines(own, [], cores) == []


@pytest.mark.slow
def test_a_second_real_run_in_another_folder_is_told(tmp_path: Path) -> None:
    here, there = Place(tmp_path / "here"), Place(tmp_path / "there")
    where, alone = {"XDG_RUNTIME_DIR": str(tmp_path)}, ("layout.replicate=1", "run.threads=1")
    first = here.start("train", "tiny.toml", "run.name=first", "train.budget=100000 steps", *alone, environment=where)
    metrics = here.path("first") / "metrics.jsonl"
    wait_while_running(lambda: metrics.exists() and metrics.stat().st_size > 0, first)
    second = there.run("train", "tiny.toml", "run.name=second", "train.budget=2 steps", *alone, environment=where)
    kill_group(first, signal.SIGINT)
    assert ended(first).code in (0, 130) and second.code == 0, second
    told = " ".join(second.out.split())
    assert f"this machine is training already: {here.path('first').resolve()} (1 worker, 1 thread each)" in told
    assert "this run gets about" in told or "enough of the" in told
    assert not list((tmp_path / "plait").iterdir())
