"""Waiting for parts from other hosts: all there, still coming, refused, never coming."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from plait.checkpoint.arrival import await_parts, part_files, partial_name, refuse_part
from plait.checkpoint.store import checkpoint_for, publish, staging_for
from plait.checkpoint.transfer import whole_slice, write_rank
from plait.errors import RunFailed


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    (tmp_path / "rank-00000.json").write_text("[]")
    return tmp_path


def in_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_parts_that_are_all_here_are_not_waited_for(staging: Path) -> None:
    await_parts(staging, 1, quiet_s=0)


def test_it_waits_for_the_list_that_comes_last(staging: Path) -> None:
    weights, parts = part_files(1)
    began = threading.Event()

    def arrive() -> None:
        began.wait(5)
        (staging / weights).write_bytes(b"x")
        (staging / partial_name(parts)).write_text("[]")
        (staging / partial_name(parts)).rename(staging / parts)

    thread = in_thread(arrive)
    began.set()
    await_parts(staging, 2, quiet_s=5)
    assert (staging / parts).exists() and (staging / weights).exists()
    thread.join(5)


def test_a_list_that_is_there_is_whole_and_its_rank_is_done(quick_disk: Path) -> None:
    """Rank 0 publishes at the moment that the last list is there, and takes the folder away with it."""
    for step in range(100):
        staging, final = staging_for(quick_disk, step), checkpoint_for(quick_disk, step)
        write_rank(staging, 0, {"model/a": whole_slice(torch.ones(2))})
        with ThreadPoolExecutor(1) as other:
            written = other.submit(write_rank, staging, 1, {"model/b": whole_slice(torch.ones(2))})
            while not (staging / part_files(1)[1]).exists():
                pass
            publish(staging, final, step=step, cursor=step, model={}, world_size=2)
            written.result()


def test_bytes_that_still_come_are_waited_for(staging: Path) -> None:
    """The whole takes five times as long as it may be quiet."""
    weights, parts = part_files(1)
    stop = threading.Event()

    def trickle() -> None:
        for count in range(10):
            with (staging / partial_name(weights)).open("ab") as file:
                file.write(bytes([count]))
            stop.wait(0.1)
        (staging / parts).write_text("[]")

    thread = in_thread(trickle)
    await_parts(staging, 2, quiet_s=0.4)
    thread.join(5)
    with pytest.raises(
        RunFailed, match=r"nothing came of the part of rank 2 from another host for .* earlier checkpoints, if"
    ):
        await_parts(staging, 3, quiet_s=0.1)


def test_a_refused_part_is_told_and_leaves_room(staging: Path) -> None:
    (staging / partial_name(part_files(1)[0])).write_bytes(b"half")
    refuse_part(staging, 1, "no room; free some space")
    with pytest.raises(RunFailed, match=r"^no room; free some space$"):
        await_parts(staging, 2, quiet_s=5)
    assert sorted(path.name for path in staging.iterdir()) == ["rank-00000.json", "rank-00001.refused"]


def test_a_refusal_that_had_no_room_is_no_half_sentence(staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk took one byte of it, and rank 0 then stopped everybody with "c"."""

    def has_room_for_one(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text.encode(encoding)[:1])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", has_room_for_one)
        refuse_part(staging, 1, "could not save the checkpoint (no space left); earlier ones are whole")
    with pytest.raises(RunFailed, match=r"rank 1 could not write its part, and has no room to say why") as told:
        await_parts(staging, 2, quiet_s=5)
    assert isinstance(told.value.__cause__, FileNotFoundError), "rank 1, which knows why, is heard before it"


def test_a_refusal_is_heard_where_its_own_failure_took_the_folder_away(staging: Path) -> None:
    """Rank 1 failed before rank 0 had begun: its refusal was lost, and rank 0 waited a minute for nothing."""
    shutil.rmtree(staging)
    refuse_part(staging, 1, "could not save the checkpoint (no space left)")
    with pytest.raises(RunFailed, match="no space left"):
        await_parts(staging, 2, quiet_s=5)


def test_what_is_given_up_is_not_waited_for(staging: Path) -> None:
    given_up = threading.Event()
    stop = threading.Timer(0.2, given_up.set)
    stop.start()
    with pytest.raises(RunFailed, match=r"a part of it \(rank 1\) could not be written; .* free some space") as told:
        await_parts(staging, 2, quiet_s=30, is_given_up=given_up.is_set)
    assert given_up.is_set() and isinstance(told.value.__cause__, FileNotFoundError), "the rank itself is heard before"
    stop.join()
