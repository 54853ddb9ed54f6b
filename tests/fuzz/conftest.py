"""A small finished run whose files are damaged, and commands carried out in this process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from plait.cli import main
from tests.end_to_end.command import RECIPE, Place

CLUSTER = """{"name": "two kinds", "islands": [{"device": "4090", "per_node": 1},
{"device": {"like": "RTX 3080", "memory_bytes": 1.2e10}, "per_node": 1, "speed": 0.9}], "between": "@1G"}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended, what it printed, and how long it took."""

    code: int
    out: str
    err: str
    seconds: float


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A folder with the finished run `fuzzed`, which has one checkpoint, and a cluster.json."""
    place = Place(tmp_path_factory.mktemp("fuzz"), RECIPE.replace("replicate = 2", "replicate = 1"))
    (place.folder / "cluster.json").write_text(CLUSTER)
    run = place.train("fuzzed", "train.budget=4 steps", "checkpoint.keep=1", "checkpoint.every=never")
    assert run.code == 0 and not run.err, run
    return place


@pytest.fixture
def plait(
    finished: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Carries out a `plait` command in this process, in the folder of the finished run."""
    monkeypatch.chdir(finished.folder)

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["plait", *arguments])
        capsys.readouterr()
        begun = time.monotonic()
        with pytest.raises(SystemExit) as ended:
            main()
        seconds, (out, err) = time.monotonic() - begun, capsys.readouterr()
        return Outcome(code=int(ended.value.code or 0), out=out, err=err, seconds=seconds)

    return run
