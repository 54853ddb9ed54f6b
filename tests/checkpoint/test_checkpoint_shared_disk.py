"""A disk that several hosts share: nothing that is looked at may be stale, and a rename whose answer is lost is
done."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from plait.checkpoint import shared_disk
from plait.checkpoint.arrival import await_parts, part_files
from plait.checkpoint.shared_disk import names_now, rename_for_all, size_now, sync_folder
from plait.errors import RunFailed


def answer_is_lost(source: Path, target: Path) -> None:
    """The server renames; its answer is lost, and the client's second try finds nothing any more."""
    source.rename(target)
    source.rename(target)


def nothing_is_done(source: Path, target: Path) -> None:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_rename_whose_answer_was_lost_is_done(tmp_path: Path, kind: str) -> None:
    source, target = tmp_path / "aside", tmp_path / "final"
    if kind == "file":
        source.write_text("new")
        target.write_text("old")
    else:
        source.mkdir()
    rename_for_all(source, target, answer_is_lost)
    assert names_now(tmp_path) == {"final"}
    assert kind == "folder" or target.read_text() == "new"


def test_a_rename_that_was_not_done_is_an_error_even_where_the_target_exists(tmp_path: Path) -> None:
    source, target = tmp_path / "aside", tmp_path / "final"
    source.write_text("new")
    target.write_text("old")
    with pytest.raises(FileNotFoundError):
        rename_for_all(source, target, nothing_is_done)
    assert target.read_text() == "old"


def test_what_nfs_keeps_of_deleted_files_is_no_name_of_ours(tmp_path: Path) -> None:
    (tmp_path / ".nfs000000000000a1b2").write_bytes(b"deleted, and still open")
    (tmp_path / "rank-00000.json").write_bytes(b"[]")
    assert names_now(tmp_path) == {"rank-00000.json"}
    assert size_now(tmp_path / "rank-00000.json") == 2


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_disk_that_has_no_sync_of_folders_is_taken_at_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(shared_disk.os, "fsync", refuse)
    if code == errno.EIO:
        with pytest.raises(OSError):
            sync_folder(tmp_path)
    else:
        sync_folder(tmp_path)


def test_parts_are_awaited_by_listing_the_folder_not_by_asking_for_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS answers for up to a minute that a name is missing that was once asked for in vain; a listing is fresh."""
    asked: list[Path] = []
    known = Path.exists

    def exists(path: Path) -> bool:
        asked.append(path)
        return known(path)

    monkeypatch.setattr(Path, "exists", exists)
    first, second = (part_files(rank)[1] for rank in (0, 1))
    (tmp_path / first).write_text("[]")
    coming = threading.Timer(0.2, (tmp_path / second).write_text, ("[]",))
    coming.start()
    await_parts(tmp_path, 2, quiet_s=10)
    assert not [path for path in asked if path.name in (first, second)]
    with pytest.raises(RunFailed, match="nothing came of the part of rank 2"):
        await_parts(tmp_path, 3, quiet_s=0.1)
