"""A checkpoint whose parts are written on several hosts: whole on host 0, or an end with a reason and nothing left."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from plait.checkpoint.store import newest_good
from plait.errors import PlaitError, RunFailed
from plait.hosts.checkpoints import UNFINISHED_CHECKPOINTS, CheckpointCollector
from plait.hosts.copies import READ_KEPT
from plait.hosts.files import READ_FILE, read_block
from plait.hosts.protocol import ReadReply, Reply, RequestKind
from plait.launch.local.run import ForkServer
from plait.launch.values.failure import WorkersFailed
from plait.launch.values.job import Job, Message
from tests.entry_tables import entries_of
from tests.launch.processes import wait_until
from tests.trainer.tiny import make_tiny

BELOW = Path("checkpoints")


class Host:
    """A host that gives away what its rank wrote, or fails as it was told to."""

    name = "host-1"

    def __init__(self, folder: Path) -> None:
        self.folder, self.fails = folder, False

    def ask(self, request: RequestKind[Any, Any], question: Any, blob: bytes = b"") -> Reply[Any]:
        assert request is READ_FILE
        if self.fails and question.offset:
            raise RunFailed("host-1 was lost: its cable was pulled", "run the same command again")
        size, data = read_block(self.folder / BELOW / question.staging, question.name, question.offset, 1000)
        return Reply(values=ReadReply(size=size), blob=data)


class EvilHost(Host):
    """A host that gives away another part than its rank wrote."""

    def __init__(self, folder: Path, change: Callable[[str, bytes], bytes]) -> None:
        super().__init__(folder)
        self.change = change

    def ask(self, request: RequestKind[Any, Any], question: Any, blob: bytes = b"") -> Reply[Any]:
        path = self.folder / BELOW / question.staging / question.name
        data = self.change(path.name, path.read_bytes())
        return Reply(values=ReadReply(size=len(data)), blob=data[question.offset :][:1000])


class SlowHost:
    """A host whose rank wrote a part that comes in very many blocks; counts those that it gave away."""

    name = "host-1"
    of_blocks = 1 << 20

    def __init__(self) -> None:
        self.blocks, self.begun = 0, threading.Event()

    def ask(self, request: RequestKind[Any, Any], question: Any, blob: bytes = b"") -> Reply[Any]:
        self.blocks += 1
        self.begun.set()
        return Reply(values=ReadReply(size=self.of_blocks), blob=b"x")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    make_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    entries = entries_of("tests.commands.host_entries", preload=("torch._dynamo", "plait.trainer.worker"))
    with ForkServer(entries) as server:
        yield server


def save(server: ForkServer, home: Path, folders: list[Path], host: Host) -> list[Message]:
    """Save on as many ranks as there are folders, and answer what was told besides."""
    told: list[Message] = []
    asked = {"home": str(home), "folders": [str(folder / BELOW) for folder in folders]}
    job = Job(entry="save_apart", argument=json.dumps(asked), world_size=len(folders), threads=1)
    with CheckpointCollector(lambda rank: host, folders[0] / BELOW, told.append) as gathering:
        server.run(job, on_message=gathering.handle_message)
    return told


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_parts_from_another_host_make_the_checkpoint_of_one(server: ForkServer, home: Path, tmp_path: Path) -> None:
    one, here, there = (tmp_path / name for name in ("one", "here", "there"))
    save(server, home, [one, one, one], Host(one))
    told = save(server, home, [here, there, there], Host(there))
    assert sorted(message.rank for message in told) == [0, 1, 2] and {message.kind for message in told} == {"heard"}
    found = newest_good(here / BELOW)
    assert found is not None and found.path.name == "step-1"
    assert files(found.path) == files(one / BELOW / "step-1")
    assert [path.name for path in (here / BELOW).iterdir()] == ["step-1"]
    assert not list((there / BELOW).iterdir())


@pytest.mark.parametrize("fault", ["lost host", "full disk"])
def test_a_part_that_cannot_be_fetched_ends_the_save(
    server: ForkServer, home: Path, tmp_path: Path, fault: str
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    host = Host(there)
    host.fails = fault == "lost host"
    if fault == "full disk":
        staging = here / BELOW / ".step-1.staging"
        staging.mkdir(parents=True)
        (staging / ".rank-00001.safetensors.part").symlink_to("/dev/full")
    why = {
        "lost host": r"\(host-1 was lost: its cable was pulled\); earlier checkpoints, if .*, are whole: fix that",
        "full disk": r"\(No space left on device.*\); earlier checkpoints, if .*, are whole: free some space",
    }[fault]
    with pytest.raises(
        RunFailed, match=rf"the part from host-1 did not arrive {why}.* and give the same command again"
    ):
        save(server, home, [here, there], host)
    assert not list((here / BELOW).iterdir()) and not list((there / BELOW).iterdir())


def flip_a_bit(name: str, data: bytes) -> bytes:
    """The last byte of the tensors is another one."""
    return data[:-1] + bytes([data[-1] ^ 1]) if name.endswith(".safetensors") else data


def cut_the_tensors(name: str, data: bytes) -> bytes:
    return data[:-4] if name.endswith(".safetensors") else data


def name_another_file(name: str, data: bytes) -> bytes:
    """The list claims to be of what rank 0 has written."""
    return data.replace(b"rank-00001.safetensors", b"rank-00000.safetensors") if name.endswith(".json") else data


def send_no_list(name: str, data: bytes) -> bytes:
    return b"[" * 10**5 if name.endswith(".json") else data


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (flip_a_bit, "the bytes of .* do not match"), (cut_the_tensors, "it has .* bytes instead of"),
        (name_another_file, "rank 1 lists parts in 'rank-00000.safetensors'"),
        (send_no_list, "its list of tensors is damaged"),
    ],
)  # fmt: skip
def test_a_part_that_is_not_what_its_list_says_ends_the_save(
    server: ForkServer, home: Path, tmp_path: Path, change: Callable[[str, bytes], bytes], why: str
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with pytest.raises(RunFailed, match=rf"the part from host-1 did not arrive \(.*{why}") as caught:
        save(server, home, [here, there], EvilHost(there, change))
    assert "\n" not in str(caught.value)
    assert not list((here / BELOW).iterdir()) and not list((there / BELOW).iterdir())


def test_a_part_that_was_found_whole_is_not_replaced(tmp_path: Path) -> None:
    staging = tmp_path / ".step-1.staging"
    staging.mkdir()
    (staging / "rank-00001.json").write_text("[]")
    host = SlowHost()
    with CheckpointCollector(lambda rank: host, tmp_path, lambda message: None) as gathering:
        gathering.handle_message(Message(rank=1, kind="wrote", values={"staging": staging.name}))
    assert host.blocks == 0


class KeepingHost(Host):
    """A host that remembers the files of the part that it gives away."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.part: dict[str, bytes] = {}

    def ask(self, request: RequestKind[Any, Any], question: Any, blob: bytes = b"") -> Reply[Any]:
        self.part = self.part or files(self.folder / BELOW / question.staging)
        return super().ask(request, question, blob)


class FullHost:
    """A host whose disk is full, so it gives away its rank's part from memory."""

    name = "host-1"

    def __init__(self, part: Mapping[str, bytes]) -> None:
        self.part = part

    def ask(self, request: RequestKind[Any, Any], question: Any, blob: bytes = b"") -> Reply[Any]:
        assert request is READ_KEPT and (question.local_rank, question.step) == (0, 1)
        data = self.part["rank-00001.safetensors" if question.what == "tensors" else "rank-00001.json"]
        return Reply(values=ReadReply(size=len(data)), blob=data[question.offset :][:1000])

    def __str__(self) -> str:
        return "host-1 (10.0.0.2)"


def test_a_part_that_its_host_keeps_in_memory_is_fetched_and_the_host_is_named(
    server: ForkServer, home: Path, tmp_path: Path
) -> None:
    there, told = KeepingHost(tmp_path / "there"), list[Message]()
    save(server, home, [tmp_path / "first", there.folder], there)
    message = Message(
        rank=1, kind="wrote", values={"staging": ".step-1.staging", "memory": {"local_rank": 0, "step": 1}}
    )
    here = tmp_path / "here"
    here.mkdir()
    with CheckpointCollector(lambda rank: FullHost(there.part), here, told.append) as gathering:
        gathering.handle_message(message)
        staging = here / ".step-1.staging"
        wait_until((staging / "rank-00001.json").exists, within_s=10)
        assert files(staging) == {name: there.part[name] for name in ("rank-00001.json", "rank-00001.safetensors")}
    [warning] = told
    assert warning.values["text"].startswith("warning  the disk of host-1 (10.0.0.2) is full, so its part of the ")


@pytest.mark.parametrize("on_full_host", ["wait", "leave out"])
def test_a_host_without_room_for_two_checkpoints_in_a_row_is_left_out_where_others_can_go_on(
    on_full_host: Literal["wait", "leave out"], tmp_path: Path
) -> None:
    def no_room(step: int) -> Message:
        return Message(rank=1, kind="no room", values={"staging": f".step-{step}.staging", "why": "No space left"})

    with CheckpointCollector(lambda rank: FullHost({}), tmp_path, lambda message: None, on_full_host) as one:
        one.handle_message(no_room(1))
        one.handle_message(Message(rank=0, kind="saved", values={}))  # a later one went well
        one.handle_message(no_room(3))
        one.handle_message(no_room(3))  # another rank's, or the same again: still one checkpoint
        if on_full_host == "wait":
            one.handle_message(no_room(4))
            return
        with pytest.raises(
            WorkersFailed, match=r"host-1 \(10.0.0.2\) has no room for its part of 2 checkpoints"
        ) as failed:
            one.handle_message(no_room(4))
    assert failed.value.facts.host == "host-1 (10.0.0.2)" and failed.value.facts.cause == "no room"


def test_only_staging_folders_are_fetched_into(tmp_path: Path) -> None:
    told: list[Message] = []
    with CheckpointCollector(lambda rank: Host(tmp_path), tmp_path, told.append) as gathering:
        gathering.handle_message(Message(rank=1, kind="wrote", values={"staging": "../elsewhere"}))
        gathering.handle_message(Message(rank=1, kind="step", values={}))
    assert [message.kind for message in told] == ["step"] and not list(tmp_path.iterdir())


def test_an_end_with_an_error_does_not_wait_for_parts_on_their_way(tmp_path: Path) -> None:
    host = SlowHost()
    with (
        pytest.raises(RunFailed, match="by a second SIGINT"),
        CheckpointCollector(lambda rank: host, tmp_path, lambda message: None) as gathering,
    ):
        gathering.handle_message(Message(rank=1, kind="wrote", values={"staging": ".step-1.staging"}))
        assert host.begun.wait(10)
        raise RunFailed("stopped at once by a second SIGINT, without saving; run the same command again")
    assert host.blocks < host.of_blocks and not list(tmp_path.iterdir())


def test_a_name_that_is_no_part_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(PlaitError):
        read_block(tmp_path, "../x", 0, 1)


def test_a_host_that_announces_checkpoints_without_end_ends_the_job(tmp_path: Path) -> None:
    """Each would keep a folder, a file and a task on host 0."""
    with (
        pytest.raises(RunFailed, match=r"announced more than 64 checkpoints that were never completed"),
        CheckpointCollector(lambda rank: Host(tmp_path), tmp_path, lambda message: None) as gathering,
    ):
        for step in range(UNFINISHED_CHECKPOINTS + 1):
            gathering.handle_message(Message(rank=1, kind="wrote", values={"staging": f".step-{step}.staging"}))
    assert not list(tmp_path.iterdir())


def test_completed_checkpoints_are_not_kept_in_mind(tmp_path: Path) -> None:
    """A long job: each staging folder is gone once rank 0 has published the checkpoint."""
    host = SlowHost()
    with CheckpointCollector(lambda rank: host, tmp_path, lambda message: None) as gathering:
        for step in range(3 * UNFINISHED_CHECKPOINTS):
            staging = tmp_path / f".step-{step}.staging"
            staging.mkdir()
            (staging / "rank-00001.json").write_text("[]")
            gathering.handle_message(Message(rank=1, kind="wrote", values={"staging": staging.name}))
            wait_until(lambda: not gathering._on_the_way, within_s=10)
            (staging / "rank-00001.json").unlink()
            staging.rmdir()
