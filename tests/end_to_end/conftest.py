"""Runs that several tests look at, each made once, and a warm `plait` for what a command refuses or prints at once."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.end_to_end.command import CALM, Ended, Place, without_waiting
from tests.end_to_end.pair import Pair
from tests.warm_process import WarmProcess

RunWarm = Callable[..., Ended]
LeftAlone = Callable[..., str]


@pytest.fixture(scope="session")
def run_warm() -> Iterator[RunWarm]:
    """Run `plait` in a place as a fork of a process that has imported the commands."""
    warm = WarmProcess(
        ("torch", "plait.cli", *(f"plait.commands.{name}" for name in ("train", "plan", "data", "sample")))
    )

    def run(place: Place, *arguments: str, **environment: str) -> Ended:
        code, out, err = warm.command(place.folder, *arguments, environment={**CALM, **environment})
        return Ended(code=code, out=out, err=without_waiting(err))

    yield run
    warm.close()


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One folder for all runs of the tiny recipe: data and plans are shared, names are not."""
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="session")
def left_alone(place: Place) -> LeftAlone:
    """The name of a finished, never interrupted run of the tiny recipe with these overrides, one for all tests."""

    @cache
    def make(*overrides: str) -> str:
        words = " ".join(overrides).lower().replace("layout.", "")
        name = "whole-" + re.sub(r"[^a-z0-9]+", "-", words).strip("-")
        run = place.train(name, *overrides, "--no-check")
        assert run.code == 0 and not run.err, run
        return name

    return make


@pytest.fixture(scope="session")
def reference(left_alone: LeftAlone) -> Callable[[int], str]:
    """The name of a finished, never interrupted run with so many workers."""
    return lambda workers: left_alone(f"layout.replicate={workers}")


@pytest.fixture
def pair(place: Place, tmp_path: Path) -> Iterator[Pair]:
    """Two hosts, the first in the folder of all runs; what a failed test leaves running is killed."""
    made = Pair(place, Place(tmp_path / "other"), tmp_path / "secret")
    yield made
    for one in (made.lead, made.other):
        for pid in one.processes():
            os.kill(pid, signal.SIGKILL)
