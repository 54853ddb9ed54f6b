"""`make faults`: real failures in numbers, with the seed that draws them; the results go to benchmarks/results."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machine import describe
from benchmarks.pairing import save
from tests.end_to_end.command import Ended, Place

Results = dict[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--seed", type=int, default=None, help="The same seed draws the same failures.")
    group.addoption("--seeds", type=int, default=50, help="How many times workers are killed, over all layouts (A1).")
    group.addoption("--hangs", type=int, default=40, help="How many workers hang (A5).")
    group.addoption("--healthy-steps", type=int, default=5000, help="Steps without a false alarm (A5).")
    group.addoption("--signals", type=int, default=40, help="How many runs are stopped by a signal (A13).")
    group.addoption("--minutes", type=float, default=30.0, help="How long failures come one after the other (A24).")
    group.addoption("--out", type=Path, default=None, help="Folder of the results; benchmarks/results if left out.")


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    asked = pytestconfig.getoption("--seed")
    drawn = random.SystemRandom().randrange(1 << 30) if asked is None else asked
    print(f"seed {drawn}")
    return drawn


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config, seed: int) -> Iterator[Results]:
    """What each test has found, by the name of its bar; saved at the end, whatever failed."""
    found: Results = {}
    yield found
    if found:
        out = pytestconfig.getoption("--out")
        result = {"machine": describe(), "seed": seed, "bars": found}
        print(f"\nwritten to {save('faults', result, out) if out else save('faults', result)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drilled:
    """How a drill ended, and its report."""

    end: Ended
    report: dict[str, Any]


class Drills:
    """Drills of one recipe in one place."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def run(self, name: str, *words: str) -> Drilled:
        """One drill; the run that is left alone is kept for the next one of that name."""
        shutil.rmtree(self.place.path(f"{name}-drill"), ignore_errors=True)
        file = self.place.folder / f"{name}.json"
        file.unlink(missing_ok=True)
        end = self.place.run("drill", "tiny.toml", f"run.name={name}", *words, "--json", str(file), within_s=600)
        assert file.exists(), end
        return Drilled(end=end, report=json.loads(file.read_text()))

    def incidents(self, name: str) -> list[dict[str, Any]]:
        """The failures of the last drill of that name."""
        path = self.place.path(f"{name}-drill") / "incidents.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if "cause" in line]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One folder for all runs of the tiny recipe: data and plans are shared, names are not."""
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="session")
def drills(place: Place) -> Drills:
    return Drills(place)
