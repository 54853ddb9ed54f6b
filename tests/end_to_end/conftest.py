"""Runs that several tests look at: each start of plait costs seconds, so the uninterrupted ones are made once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from tests.end_to_end.command import Place  # noqa: E402


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
