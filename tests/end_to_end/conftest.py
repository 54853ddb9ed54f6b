"""Runs that several tests look at, each made once, and a warm `plait` for what a command refuses or prints at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.end_to_end.command import CALM, Ended, Place
from tests.end_to_end.pair import Pair
from tests.warm_process import WarmProcess

RunWarm = Callable[..., Ended]


@pytest.fixture(scope="session")
def run_warm() -> Iterator[RunWarm]:
    """Run `plait` in a place as a fork of a process that has imported the commands."""
    warm = WarmProcess(
        ("torch", "plait.cli", *(f"plait.commands.{name}" for name in ("train", "plan", "data", "sample")))
    )

    def run(place: Place, *arguments: str, **environment: str) -> Ended:
        code, out, err = warm.command(place.folder, *arguments, environment={**CALM, **environment})
        return Ended(code=code, out=out, err=err)

    yield run
    warm.close()


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One folder for all runs of the tiny recipe: data and plans are shared, names are not."""
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="session")
def reference(place: Place) -> Callable[[int], str]:
    """The name of a finished, never interrupted run with so many workers."""

    @cache
    def make(workers: int) -> str:
        name = f"whole-{workers}"
        run = place.train(name, f"layout.replicate={workers}")
        assert run.code == 0 and not run.err, run
        return name

    return make


@pytest.fixture
def pair(place: Place, tmp_path: Path) -> Iterator[Pair]:
    """Two hosts, the first in the folder of all runs; what a failed test leaves running is killed."""
    made = Pair(place, Place(tmp_path / "other"), tmp_path / "secret")
    yield made
    for one in (made.lead, made.other):
        for pid in one.processes():
            os.kill(pid, signal.SIGKILL)
