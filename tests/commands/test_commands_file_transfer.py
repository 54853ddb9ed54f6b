"""Files on their way between hosts: only what is lacking, whole or not at all, and never out of their folder."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from plait.checked_json import typed_value
from plait.errors import PlaitError
from plait.hosts.files import (
    READ_FILE,
    TRANSFER_BLOCK_BYTES,
    BlockHeader,
    FileEntry,
    IncomingFolder,
    Offer,
    OfferReply,
    ReadRequest,
    fetch_file,
    file_entries_of,
    read_block,
    safe_path,
    send_folder,
)
from plait.hosts.protocol import DONE, ReadReply, Reply, RequestKind
from plait.hosts.shared_folder import has_nonce, write_nonce


class Other:
    """Another host in this process: a folder, and the answers of one that takes and gives files."""

    name = "other"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blocks: list[tuple[str, int, int]] = []
        self.cut_after = 10**9
        self._intake: IncomingFolder | None = None

    def ask(self, request: RequestKind[Any, Any], question: Any, blob: bytes = b"") -> Reply[Any]:
        if isinstance(question, Offer):
            self._intake = IncomingFolder(self.folder, question.files)
            return Reply(values=OfferReply(folder=str(self.folder), lacking=self._intake.missing))
        if isinstance(question, ReadRequest):
            size, data = read_block(self.folder, question.name, question.offset, question.bytes)
            return Reply(values=ReadReply(size=size), blob=data)
        assert isinstance(question, BlockHeader) and self._intake is not None
        self.blocks.append((question.name, question.offset, len(blob)))
        if len(self.blocks) > self.cut_after:
            raise PlaitError("the cable was pulled", "plug it in")
        self._intake.write_block(question.name, question.offset, blob)
        return DONE


@pytest.fixture
def sender(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "large.bin").write_bytes(bytes(range(256)) * (TRANSFER_BLOCK_BYTES // 128) + b"tail")
    (folder / "empty.bin").write_bytes(b"")
    (folder / "exact.bin").write_bytes(b"e" * TRANSFER_BLOCK_BYTES)
    (folder / "index.json").write_text("{}")
    return folder


def offer_of(files: Sequence[FileEntry]) -> Offer:
    return Offer(root="cache", path="data/x", files=tuple(files))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_travels_once_in_blocks_and_its_last_file_comes_last(sender: Path, tmp_path: Path) -> None:
    other, facts = Other(tmp_path / "there"), file_entries_of(sender, final_name="index.json")
    folder, nbytes = send_folder(other, sender, offer_of(facts))
    assert folder == str(other.folder) and nbytes == sum(path.stat().st_size for path in sender.iterdir())
    assert contents(other.folder) == contents(sender)
    assert other.blocks[-1][0] == "index.json"
    assert max(size for _, _, size in other.blocks) == TRANSFER_BLOCK_BYTES
    assert [size for name, _, size in other.blocks if name == "large.bin"] == [
        TRANSFER_BLOCK_BYTES,
        TRANSFER_BLOCK_BYTES,
        4,
    ]
    other.blocks.clear()
    assert send_folder(other, sender, offer_of(facts)) == (str(other.folder), 0) and not other.blocks


def test_only_what_differs_travels_again(sender: Path, tmp_path: Path) -> None:
    other, facts = Other(tmp_path / "there"), file_entries_of(sender, final_name="index.json")
    send_folder(other, sender, offer_of(facts))
    other.blocks.clear()
    (other.folder / "exact.bin").write_bytes(b"f" * TRANSFER_BLOCK_BYTES)
    (other.folder / "large.bin").write_bytes(b"")
    send_folder(other, sender, offer_of(facts))
    assert {name for name, _, _ in other.blocks} == {"exact.bin", "large.bin"}
    assert contents(other.folder) == contents(sender)


def test_cut_off_half_way_the_next_call_goes_on_after_the_last_whole_file(sender: Path, tmp_path: Path) -> None:
    other, facts = Other(tmp_path / "there"), file_entries_of(sender, final_name="index.json")
    other.cut_after = 3
    with pytest.raises(PlaitError, match="cable"):
        send_folder(other, sender, offer_of(facts))
    assert "index.json" not in contents(other.folder) and "large.bin" not in contents(other.folder)
    other.cut_after = 10**9
    other.blocks.clear()
    send_folder(other, sender, offer_of(facts))
    assert {name for name, _, _ in other.blocks} == {"large.bin", "index.json"}
    assert contents(other.folder) == contents(sender)


def test_what_is_not_as_offered_does_not_appear(sender: Path, tmp_path: Path) -> None:
    other = Other(tmp_path / "there")
    lie = FileEntry(name="exact.bin", nbytes=TRANSFER_BLOCK_BYTES, sha256="0" * 64)
    with pytest.raises(PlaitError, match=r"exact.bin did not arrive as it was sent"):
        send_folder(other, sender, offer_of([lie]))
    assert contents(other.folder) == {}


def test_known_hashes_are_not_computed_again(sender: Path) -> None:
    facts = {
        fact.name: fact
        for fact in file_entries_of(sender, final_name="index.json", known_hashes={"large.bin": "known"})
    }
    assert facts["large.bin"].sha256 == "known" and facts["exact.bin"].sha256 != "known"
    assert [typed_value(FileEntry, asdict(fact)) for fact in facts.values()] == list(facts.values())


def test_pieces_out_of_order_and_files_that_nobody_asked_for_are_refused(tmp_path: Path) -> None:
    intake = IncomingFolder(tmp_path / "there", [FileEntry(name="a", nbytes=9, sha256="0" * 64)])
    with pytest.raises(PlaitError, match="which was not requested"):
        intake.write_block("b", 0, b"x")
    with pytest.raises(PlaitError, match="sent more of 'a' than it offered"):
        intake.write_block("a", 0, b"0123456789")
    intake.write_block("a", 0, b"abc")
    with pytest.raises(PlaitError, match=r"a piece of .* is missing"):
        intake.write_block("a", 6, b"xyz")
    assert contents(tmp_path / "there") == {}


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../b", "", ".hidden", "a//b", "a/b/c/d", "a\0b", "a b"])
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlaitError, match="which plait never does"):
        safe_path(tmp_path, name)
    with pytest.raises(PlaitError):
        IncomingFolder(tmp_path, [FileEntry(name=name, nbytes=1, sha256="")])


def test_what_cannot_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=r"the run's files need .* on this host, where .* are free; free some space"):
        IncomingFolder(tmp_path, [FileEntry(name="vast", nbytes=1 << 60, sha256="")])
    assert not list(tmp_path.iterdir())


def test_a_file_whose_rest_does_not_come_is_taken_away(tmp_path: Path) -> None:
    intake = IncomingFolder(tmp_path, [FileEntry(name="a", nbytes=9, sha256="0" * 64)])
    intake.discard_partial_file()
    intake.write_block("a", 0, b"abc")
    assert [path.name for path in tmp_path.iterdir()] == [".a.part"]
    intake.discard_partial_file()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_and_nothing_half_written_stays(tmp_path: Path) -> None:
    intake = IncomingFolder(tmp_path, [FileEntry(name="a", nbytes=9, sha256="0" * 64)])
    (tmp_path / ".a.part").symlink_to("/dev/full")
    with pytest.raises(PlaitError, match=r"this host cannot write .* \(No space left on device\); free some space"):
        intake.write_block("a", 0, b"x" * 9)
    assert not list(tmp_path.iterdir())


def test_a_file_is_fetched_and_appears_whole(sender: Path, tmp_path: Path) -> None:
    for name in ("large.bin", "empty.bin"):
        fetch_file(Other(sender), READ_FILE, ReadRequest(name=name), tmp_path / name)
        assert (tmp_path / name).read_bytes() == (sender / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.bin", "here", "large.bin"]


def test_a_file_that_nobody_wants_any_more_does_not_appear(sender: Path, tmp_path: Path) -> None:
    asked: list[bool] = []

    def after_one_block() -> bool:
        asked.append(True)
        return len(asked) > 1

    with pytest.raises(PlaitError, match=r"large\.bin is not needed any more"):
        target = tmp_path / "large.bin"
        fetch_file(Other(sender), READ_FILE, ReadRequest(name="large.bin"), target, is_cancelled=after_one_block)
    assert len(asked) == 2 and not (tmp_path / "large.bin").exists()


def test_a_nonce_is_seen_only_where_it_was_written_and_goes_away(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    with write_nonce(here) as (name, content):
        assert has_nonce(here, name, content) and not has_nonce(there, name, content)
        assert not has_nonce(here, name, "another")
        (there / name).write_text("something else")
        assert not has_nonce(there, name, content)
    assert not list(here.iterdir())


def test_a_shared_folder_in_which_this_host_cannot_work_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with write_nonce(tmp_path) as (name, content):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
        monkeypatch.setattr(secrets, "token_hex", lambda size: "drawn")
        (tmp_path / f"{name}.drawn.seen").mkdir()
        with pytest.raises(
            PlaitError, match=r"this host cannot write .*; check the folder and the disk, then join again"
        ):
            has_nonce(tmp_path, name, content)

        def refuse(*_: object, **__: object) -> str:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "read_text", refuse)
        with pytest.raises(PlaitError, match=r"cannot be read here; join as the user who started the run"):
            has_nonce(tmp_path, name, content)
