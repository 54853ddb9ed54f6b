"""The parts without processes: failures into sentences, lines on a wire, torchrun's environment."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from plait.errors import PlaitError, RunFailed
from plait.launch.local.channel import LINE_BYTES_AT_MOST, LineReader, send_line
from plait.launch.local.torchrun import LaunchVariables, launch_variables, torchrun_context
from plait.launch.values.failure import (
    RankDied,
    RankRaised,
    describe_exception,
    error_for_caller,
    rank_raised_from,
    root_cause,
)
from plait.units import parse_amount

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def _caught(error: BaseException, cause: BaseException | None = None) -> RankRaised:
    try:
        raise error from cause
    except BaseException as caught:
        return describe_exception(caught, 1)


def test_a_loss_of_a_peer_never_hides_its_reason():
    lost = _caught(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"))
    later = RankDied(rank=0, at_s=lost.at_s + 0.5, code=-9)
    assert lost.lost_peer
    assert root_cause([lost, later]) is later
    assert root_cause([lost]) is lost
    assert str(error_for_caller(lost, "above")).startswith("rank 1 lost its connection to another rank")
    assert _caught(RunFailed("a peer was lost; try again"), ConnectionResetError("Connection reset by peer")).lost_peer
    assert not _caught(ValueError("Connection closed by peer is what the file says")).lost_peer


def test_the_first_of_several_reasons_is_chosen():
    first = RankDied(rank=2, at_s=1.0, code=1)
    assert root_cause([RankDied(rank=0, at_s=2.0, code=-11), first]) is first


def test_the_place_is_the_last_frame_inside_plait():
    try:
        parse_amount(5)  # type: ignore[arg-type]
    except TypeError as error:
        assert describe_exception(error, 0).place.startswith("plait/units.py:")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory")])
def test_memory_running_out_is_no_bug(error: BaseException):
    sentence = str(error_for_caller(_caught(error), "above"))
    assert sentence.startswith("rank 1 ran out of memory")
    assert "take smaller micro-batches (layout.micro_sequences)" in sentence


def test_a_class_unknown_here_arrives_as_its_nearest_ancestor():
    failure = _caught(RunFailed("the disk is full; make room"))
    travelled = rank_raised_from(json.loads(json.dumps(asdict(failure))))
    assert travelled == failure
    strange = rank_raised_from({**asdict(failure), "plait_classes": ["gone:Never", *failure.plait_classes]})
    assert type(error_for_caller(strange, "above")) is RunFailed


def test_an_exception_whose_text_cannot_be_made_is_still_told():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "Mute: its message cannot be shown" in str(error_for_caller(_caught(Mute()), "above"))


@pytest.fixture
def wire() -> Iterator[tuple[socket.socket, LineReader]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield theirs, LineReader(ours, sender="rank 7")


def test_lines_are_whole_or_not_at_all(wire: tuple[socket.socket, LineReader]):
    sender, reader = wire
    assert reader.read() == []
    sender.sendall(b'{"a": 1}\n{"b"')
    assert reader.read() == [{"a": 1}]
    sender.sendall(b": 2}\n{")
    sender.close()
    assert reader.read_all() == [{"b": 2}]
    assert reader.ended


@pytest.mark.parametrize("line", [b"not json\n", b"[1]\n", b"\xff\n"])
def test_garbage_is_refused_with_its_sender(wire: tuple[socket.socket, LineReader], line: bytes):
    wire[0].sendall(line)
    with pytest.raises(RunFailed, match="rank 7 sent bytes that are not a message"):
        wire[1].read()


def test_a_line_without_end_is_refused(wire: tuple[socket.socket, LineReader]):
    sender, reader = wire
    with pytest.raises(RunFailed, match="rank 7"):
        for _ in range(2 * LINE_BYTES_AT_MOST // 50_000):
            sender.sendall(b"x" * 50_000)
            reader.read()
    with pytest.raises(ValueError, match="over the cap"):
        send_line(sender, {"x": "x" * LINE_BYTES_AT_MOST})


def test_descriptors_travel_beside_a_line():
    ours, theirs = socket.socketpair()
    reader = LineReader(theirs, sender="the supervisor", descriptors_at_most=2)
    with ours, theirs, socket.socket() as extra:
        send_line(ours, {"run": "x" * 10}, [extra.fileno()])
        assert reader.read() == [{"run": "x" * 10}]
        assert len(reader.descriptors) == 1
        socket.socket(fileno=reader.descriptors[0]).close()


def test_bad_numbers_from_torchrun_are_told_before_anything_is_changed(monkeypatch):
    for name, value in zip(NAMES, ("0", "two", "0", "localhost", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(PlaitError, match=r"WORLD_SIZE = 'two' in the environment is not a number"):
        torchrun_context()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_without_torchrun_there_is_no_context(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert torchrun_context() is None


WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_local_variables_may_be_absent() -> None:
    found = launch_variables(WHOLE)
    assert found == LaunchVariables(rank=1, world_size=4, local_rank=1, local_world_size=None)
    without = {name: text for name, text in WHOLE.items() if name != "LOCAL_RANK"}
    assert launch_variables(without) == LaunchVariables(rank=1, world_size=4, local_rank=None, local_world_size=None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"MASTER_PORT": ""},
            "and MASTER_PORT is not: set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT for each process",
        ),
        ({"RANK": "", "MASTER_ADDR": ""}, "and RANK and MASTER_ADDR are not: set "),
        ({"RANK": "4"}, "RANK = 4 in the environment should be less than WORLD_SIZE = 4"),
        ({"WORLD_SIZE": "0"}, "RANK = 1 in the environment should be less than WORLD_SIZE = 0"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE = 5 in the environment should be at most WORLD_SIZE = 4"),
        ({"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK = 1 in the environment should be less than LOCAL_WORLD_SIZE = 1"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK = 2 in the environment should be at most RANK = 1"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT = 70000 in the environment is not a port"),
        ({"RANK": "-1"}, "RANK = '-1' in the environment is not a number"),
    ],
)
def test_variables_of_a_launcher_that_cannot_be_are_one_sentence(changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(PlaitError) as caught:
        launch_variables({**WHOLE, **changes})
    assert sentence in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("stray", [{}, {"MASTER_ADDR": "a", "LOCAL_RANK": "3"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_one_process_needs_nowhere_to_meet(stray: dict[str, str]) -> None:
    assert launch_variables(stray) is None
