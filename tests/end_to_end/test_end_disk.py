"""A disk that fills up while preparing or saving: a clean stop, nothing damaged, and on it goes once there is room."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plait.checkpoint.store import verify_checkpoint
from tests.end_to_end.command import Place, ended, kill_group, wait_while_running
from tests.small_file_system import small_file_system

FILE_LIMIT_BYTES = 150_000


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, FILE_LIMIT_BYTES))


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of eight MiB, or as many as are named; needs the right to mount."""
    with small_file_system(tmp_path, f"size={getattr(request, 'param', 8)}m") as disk:
        yield disk


def fill(disk: Path, leave_bytes: int) -> Path:
    """Fill a disk but for so much."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    filler.open("r+b").truncate(filler.stat().st_size - leave_bytes)
    return filler


def logged_steps(here: Place) -> int:
    metrics = here.path("full") / "metrics.jsonl"
    return metrics.read_bytes().count(b'"loss"') if metrics.exists() else 0


@pytest.mark.slow
def test_a_full_disk(small_disk: Path, place: Place, reference: Callable[[int], str]) -> None:
    here = Place(small_disk / "work")
    filler = fill(small_disk, 8_192)
    preparing = here.run("data", "tiny.toml")
    assert preparing.code == 2
    assert preparing.sentence().startswith("the disk is full")
    assert not [path for path in (here.folder / ".plait" / "data").glob("*") if path.is_dir()]

    filler.unlink()
    assert here.run("data", "tiny.toml").code == 0
    filler = fill(small_disk, 0)
    planning = here.train("full")
    assert planning.code == 2
    # Where it is met, in the folder of the data or when the plan is kept, depends on what the disk had freed by then.
    assert "No space left on device" in planning.sentence() and "; free " in planning.sentence()

    filler.unlink()
    filler = fill(small_disk, 300_000)
    saving = here.start("train", "tiny.toml", "run.name=full")
    said = said_until("is kept in memory", saving)
    assert "\nwarning  " in said and "nothing was saved since this start began at step 0" in " ".join(said.split())
    kill_group(saving, signal.SIGINT)
    stopped = ended(saving)
    # Ctrl-C ends the wait for room, and it is no silent stop: nothing was saved.
    assert stopped.code == 1 and "stopped " not in stopped.out, stopped
    assert "free" in stopped.sentence() and "earlier checkpoints, if there are any, are whole" in stopped.err
    here.assert_nobody_left()
    assert here.checkpoints("full") == []

    saving = here.start("train", "tiny.toml", "run.name=full")
    said_until("is kept in memory", saving)
    filler.unlink()
    last = ended(saving)
    assert last.code == 0 and not last.err
    assert here.manifest("full") == place.manifest(reference(2))
    assert here.numbers("full") == place.numbers(reference(2))


def said_until(text: str, process: subprocess.Popen[str]) -> str:
    """What a command printed up to a line with this text."""
    assert process.stdout is not None
    said = ""
    while text not in (line := process.stdout.readline()):
        assert line, f"it ended without {text!r}: {said}"
        said += line
    return said + line


@pytest.mark.slow
@pytest.mark.parametrize("small_disk", [48], indirect=True)
def test_training_goes_on_while_the_disk_has_no_byte_left(small_disk: Path, place: Place) -> None:
    here, settings = Place(small_disk / "work"), ("train.budget=300 steps", 'checkpoint.every="15 steps"', "--no-check")
    process = here.start("train", "tiny.toml", "run.name=full", *settings)
    wait_while_running(lambda: logged_steps(here) > 20, process)
    filler = fill(small_disk, 0)
    wait_while_running(lambda: logged_steps(here) > 200, process)
    filler.unlink()
    last = ended(process)
    assert last.code == 0 and not last.err, last
    # After the first, second, fourth and eighth failure, with the age of what there is.
    assert 3 <= last.out.count("\nwarning  ") <= 5, last.out
    assert re.search(
        r"the newest checkpoint is that of step \d+, [\d.]+ \w+ old; training goes on", " ".join(last.out.split())
    )
    assert not (here.path("full") / "incidents.jsonl").exists()
    assert place.train("whole", *settings).code == 0
    assert here.manifest("full", 300) == place.manifest("whole", 300) and here.numbers("full") == place.numbers("whole")


@pytest.mark.slow
def test_a_write_that_fails_while_saving(place: Place, reference: Callable[[int], str]) -> None:
    limited = place.train("limited", preexec_fn=limit_file_size)
    assert limited.code == 1
    # Of the five saves on the way the first, second and fourth that fail are warned of.
    assert limited.out.count("\nwarning  could not save the checkpoint (File too large: ") == 3
    assert "training goes on" in " ".join(limited.out.split())
    # The same limit is in the way of copies of the state in memory.
    assert "warning  the state is not kept in memory" in limited.out and "(ulimit -f)" in limited.out
    assert "File too large" in limited.sentence() and "earlier checkpoints, if there are any, are whole" in limited.err
    assert place.checkpoints("limited") == [] and not list((place.path("limited") / "checkpoints").glob(".*"))
    last = place.train("limited")
    assert last.code == 0
    assert place.manifest("limited") == place.manifest(reference(2))
    assert [verify_checkpoint(path) for path in (place.path("limited") / "checkpoints").iterdir()]
