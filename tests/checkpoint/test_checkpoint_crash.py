"""Kill -9 at every call that touches the disk, full disks, and disks that say no: the last good checkpoint stays."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from plait.checkpoint.store import clean_staging, newest_good, prune, staging_for, verify_checkpoint
from plait.checkpoint.transfer import whole_slice, write_rank
from plait.errors import RunFailed
from tests.matrix import few_fast
from tests.small_file_system import small_file_system

CHANGES = ("open", "write", "flush", "fsync", "close", "rename", "mkdir", "unlink", "rmdir", "remove")
DISK_CALLS = {*CHANGES, "scandir", "listdir", "stat", "lstat", "fstat", "statvfs"}


def watch_disk_calls(seen: Callable[[str], None]) -> None:
    """Have `seen` called just before every call into C that touches the disk."""

    def profile(_frame: object, event: str, function: object) -> None:
        name = getattr(function, "__name__", "")
        if event == "c_call" and name in DISK_CALLS:
            seen(name)

    sys.setprofile(profile)


def disk_calls(action: Callable[[], object]) -> list[str]:
    names: list[str] = []
    try:
        watch_disk_calls(names.append)
        action()
    finally:
        sys.setprofile(None)
    return names


def killed_before(call: int, action: Callable[[], object]) -> None:
    """Run `action` in a forked process that is killed by SIGKILL just before its disk call number `call`."""
    child = os.fork()
    if child == 0:
        left = call

        def count(_name: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            watch_disk_calls(count)
            action()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(
    "before", few_fast(["an older checkpoint", "the same step, and no other"], "an older checkpoint")
)
def test_killed_at_any_disk_call_there_is_always_a_good_checkpoint(quick_disk, save, before):
    start = 1 if before == "an older checkpoint" else 2

    seed = save(quick_disk / "seed", start)

    def fresh(name: str) -> Path:
        shutil.copytree(seed, quick_disk / name / seed.name)
        return quick_disk / name

    def save_and_prune(folder: Path) -> None:
        save(folder, 2)
        prune(folder, 1, whole={2})

    reference = fresh("reference")
    points = len(disk_calls(lambda: save_and_prune(reference)))
    wanted = (reference / "step-2" / "manifest.json").read_bytes()
    steps_found = []
    for call in range(points):
        folder = fresh(f"kill-{call}")
        killed_before(call, lambda folder=folder: save_and_prune(folder))
        found = newest_good(folder)
        assert found is not None and found.skipped == ()
        steps_found.append(found.manifest.step)
        clean_staging(folder)
        assert all(path.name in ("step-1", "step-2") for path in folder.iterdir())
        assert all(verify_checkpoint(path) for path in folder.iterdir())  # none is left half written or half deleted
        again = newest_good(folder)
        assert again is not None and again.manifest == found.manifest
        save_and_prune(folder)
        assert [path.name for path in folder.iterdir()] == ["step-2"]
        assert (folder / "step-2" / "manifest.json").read_bytes() == wanted
    assert points >= 60, points
    assert steps_found == sorted(steps_found) and set(steps_found) == {start, 2}


def test_everything_is_on_the_disk_before_the_rename_and_the_name_after_it(folder, save):
    calls = disk_calls(lambda: save(folder, 1))
    assert calls.count("rename") == 2 + 1  # each rank's list comes to its place by one
    published = last(calls, "rename")
    before, after = calls[:published], calls[published:]
    # Two ranks sync a data file, a list and the folder each; rank 0 then the manifest and the folder.
    assert before.count("fsync") == 2 * 3 + 2
    assert last(before, "fsync") > max(last(before, name) for name in ("write", "unlink", "mkdir", "rename"))
    assert "fsync" in after


def last(calls: list[str], name: str) -> int:
    return max(index for index, call in enumerate(calls) if call == name)


def test_a_disk_that_fills_up_while_writing_stops_cleanly(folder, save):
    save(folder, 1)
    staging_for(folder, 2).mkdir()
    (staging_for(folder, 2) / "rank-00000.safetensors").symlink_to("/dev/full")
    with pytest.raises(RunFailed, match=r"No space left on device.*are whole: free some space") as caught:
        save(folder, 2)
    assert caught.value.exit_code == 1
    assert [path.name for path in folder.iterdir()] == ["step-1"]
    verify_checkpoint(folder / "step-1")


@pytest.mark.parametrize("name", [".rank-00001.json.part", "manifest.json"])
def test_a_disk_that_fills_up_at_the_last_moment_stops_cleanly(folder, save, name):
    save(folder, 1)
    staging_for(folder, 2).mkdir()
    (staging_for(folder, 2) / name).symlink_to("/dev/full")
    with pytest.raises(RunFailed, match="No space left on device"):
        save(folder, 2)
    assert [path.name for path in folder.iterdir()] == ["step-1"]


def test_a_file_size_limit_stops_cleanly(folder, save):
    save(folder, 1)
    slices = {"model/w": whole_slice(torch.ones(100_000))}  # torch's threads do not survive a fork
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            write_rank(staging_for(folder, 2), 0, slices)
        except RunFailed as failure:
            os._exit(0 if os.strerror(errno.EFBIG) in str(failure) else 2)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert [path.name for path in folder.iterdir()] == ["step-1"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB and a few inodes; needs the right to mount."""
    with small_file_system(tmp_path, "size=1m,nr_inodes=16") as disk:
        yield disk


def test_too_little_space_is_told_in_bytes_before_anything_is_written(small_disk, save):
    folder = small_disk / "checkpoints"
    save(folder, 1)
    with pytest.raises(
        RunFailed, match=r"saving needs 3\.81 MiB \(40\d{5} bytes\) in .*checkpoints, where .* are free"
    ):
        write_rank(staging_for(folder, 2), 0, {"model/w": whole_slice(torch.ones(1_000_000))})
    assert [path.name for path in folder.iterdir()] == ["step-1"]
    verify_checkpoint(folder / "step-1")


def test_running_out_of_inodes_stops_cleanly_and_works_again_with_room(small_disk, save):
    folder = small_disk / "checkpoints"
    save(folder, 1)
    fillers = []
    with pytest.raises(OSError, match="No space left"):
        for index in range(20):
            (small_disk / f"filler-{index}").touch()
            fillers.append(small_disk / f"filler-{index}")
    fillers.pop().unlink()
    with pytest.raises(RunFailed, match="No space left on device"):
        save(folder, 2)
    assert [path.name for path in folder.iterdir()] == ["step-1"]
    for filler in fillers:
        filler.unlink()
    save(folder, 2)
    found = newest_good(folder)
    assert found is not None and found.manifest.step == 2
