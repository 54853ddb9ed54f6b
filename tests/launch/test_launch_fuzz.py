"""Frames of the wire, damaged in a thousand ways with the right code beside them: a sentence or a plain value."""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import socket
import struct
import unicodedata
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from plait.checked_json import DEEPEST
from plait.hosts.joining import listener_at
from plait.hosts.protocol import (
    Answer,
    Disconnect,
    EventReport,
    KillServerOrder,
    Question,
    Refusal,
    RunEnd,
    SignalOrder,
    StartOrder,
    UnexpectedMessage,
    parse_message,
)
from plait.hosts.remote_ranks import parse_event
from plait.hosts.wire import FRAME_BYTES_AT_MOST, Frame, SessionKeys, Wire, WireEnded, parse_frame_text
from plait.launch.values.failure import RankRaised
from plait.launch.values.job import HostRanks, Job
from tests.launch.mutants import mutants

SEED = 27
KEYS = SessionKeys(sending=b"a", receiving=b"b")
HEAD = struct.Struct("!IQI")
MAC_BYTES = 32
PART = HostRanks(first_rank=1, ranks=2)
JOB = Job(entry="hello", argument="{}", world_size=3, threads=1, log_dir="/logs", part=PART)
RAISED = RankRaised(
    rank=1, at_s=1.0, type_name="E", text="t", place="p", plait_classes=("a:B",), lost_peer=False, out_of_memory=False,
    traceback="",
)  # fmt: skip
MESSAGES: tuple[tuple[type, dict[str, Any]], ...] = (
    (StartOrder, {"number": 1, "job": asdict(JOB), "rendezvous": "tcp://10.0.0.1:29400/job-1"}),
    (SignalOrder, {"number": 1, "order": "SIGTERM"}),
    (KillServerOrder, {"number": 1}),
    (Refusal, {"sentence": "the run has all its hosts"}),
    (RunEnd, {"stopped_by": "SIGINT"}),
    (RunEnd, {"failed": "the disk is full"}),
    (Disconnect, {"why": "it was stopped there"}),
    (Question, {"number": 1, "kind": "read", "values": {"name": "a", "offset": 0}}),
    (Answer, {"number": 1, "values": {"size": 5}}),
    (Answer, {"number": 1, "raised": asdict(RAISED)}),
)
EVENTS: tuple[dict[str, Any], ...] = (
    {"forked": True},
    {"rank": 1, "started": 77},
    {"rank": 1, "message": "step", "values": {"loss": 2.5, "text": "é"}},
    {"rank": 2, "returned": True},
    {"rank": 1, "raised": asdict(RAISED)},
    {"rank": 1, "ended": True},
    {"died": 2, "code": -9, "at_s": 5.5},
    {"over": True, "reason": "the process that starts the workers ended"},
    {"stop": "SIGINT"},
)


def sealed(body: bytes, *, counter: int = 0, text_bytes: int | None = None, length: int | None = None) -> bytes:
    """A frame with the code that only who knows the keys can make, whatever is in it."""
    text_bytes = len(body) if text_bytes is None else text_bytes
    length = HEAD.size - 4 + len(body) + MAC_BYTES if length is None else length
    whole = HEAD.pack(length, counter, text_bytes) + body
    return whole + hmac.digest(b"b", whole, hashlib.sha256)


def received(stream: bytes) -> Frame | str:
    """What a host makes of these bytes: a frame, or the sentence with which it gives up the connection."""
    with listener_at("127.0.0.1", 0) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    with near, far:
        far.sendall(stream)
        far.shutdown(socket.SHUT_WR)
        try:
            frame = Wire(near, KEYS, peer="far").receive(5)
        except WireEnded as ended:
            return str(ended)
    assert frame is not None
    return frame


def assert_harmless(found: Frame | str) -> None:
    if isinstance(found, str):
        assert found.startswith("far was lost: ") and "\n" not in found and len(found) < 500 and found.isprintable()
        return
    text = json.dumps({"kind": found.kind, "values": found.values}, ensure_ascii=False, allow_nan=False)
    assert not {unicodedata.category(sign) for sign in text} & {"Cc", "Cs"}  # json.dumps escapes line breaks
    assert "\u202e" not in text and "\\u00" not in text


def honest_bodies() -> list[bytes]:
    return [json.dumps({"kind": kind.__name__, "values": values}).encode() for kind, values in MESSAGES]


def damaged_frames(count: int) -> Iterator[bytes]:
    """Half of them with JSON that is well-formed, the others with bytes put anywhere."""
    dice = random.Random(SEED)
    wholes = [{"kind": kind.__name__, "values": values} for kind, values in MESSAGES]
    for at in range(count // 2):
        whole = wholes[at % len(wholes)]
        if at % 2:
            (damaged,) = mutants(whole, 1, SEED + at)
        else:  # a message in order, whose values are not
            (values,) = mutants(whole["values"], 1, SEED + at)
            damaged = {**whole, "values": values}
        yield sealed(json.dumps(damaged, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass"))
    for at in range(count - count // 2):
        body = bytearray(dice.choice(honest_bodies()))
        for _ in range(dice.randint(1, 4)):
            place = dice.randrange(len(body))
            body[place : place + dice.randint(0, 3)] = dice.choice(ODD_BYTES)
        yield sealed(bytes(body)) if at % 4 else sealed(bytes(body))[: dice.randint(0, HEAD.size + len(body))]


ODD_BYTES = (
    b"\xff", b"\x00", b"\xed\xa0\x80", b"\xc0\xaf", b"\x1b", b"NaN", b"-Infinity", b"1e999", b"[" * 3000, b"{" * 3000,
    b'{"a":' * 3000, b"9" * 5000, b'"', b"\\ud800", b"\\", b"\n", b"'", b"\xef\xbb\xbf", b"",
)  # fmt: skip


def test_a_damaged_frame_is_a_sentence_or_a_plain_value() -> None:
    found = [received(frame) for frame in damaged_frames(600)]
    for one in found:
        assert_harmless(one)
    accepted = sum(isinstance(one, Frame) for one in found)
    assert 60 < accepted < 540, "the mutants are all alike"


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (sealed(b"{}", length=FRAME_BYTES_AT_MOST), "of an impossible length"),
        (sealed(b"{}", length=(1 << 32) - 1), "of an impossible length"),
        (sealed(b"{}", length=0), "of an impossible length"),
        (sealed(b'{"kind":"a","values":{}}', counter=1), "out of its order"),
        (sealed(b'{"kind":"a","values":{}}', text_bytes=(1 << 32) - 1), "whose parts do not fit into it"),
        (sealed(b'{"kind":"a","values":{}}', text_bytes=3), "is not a message of plait"),
        (sealed(b"\xff\xfe"), "is not a message of plait"),
        (sealed(b'{"kind":"a","values":{"a":NaN}}'), "NaN is no number that plait writes"),
        (sealed(b'{"kind":"a","values":{"a":-Infinity}}'), "-Infinity is no number that plait writes"),
        (sealed(b'{"kind":"a","values":{"a":1e999}}'), "1e999 is no number that plait writes"),
        (sealed(b'{"kind":"a","values":{"a":' + b"[" * 40 + b"]" * 40 + b"}}"), "nested too deeply"),
        (sealed(b'{"kind":"a","values":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
        (sealed(b'{"kind":"a","values":{"a":' + b"1" * 5000 + b"}}"), "is not a message of plait"),
        (sealed(b'{"kind":5,"values":{}}'), "(kind should be text)"),
        (sealed(b'{"kind":"a","values":[]}'), "(values should be a table of keys and values)"),
        (sealed(b'{"kind":"a","values":{},"blob":"x"}'), "is not a message of plait"),
    ],
)
def test_a_frame_that_cannot_be_is_refused_with_the_reason(frame: bytes, why: str) -> None:
    found = received(frame)
    assert isinstance(found, str) and why in found
    assert_harmless(found)


def test_a_frame_in_order_is_accepted() -> None:
    body = b'{"kind":"a","values":{"a":[1,2.5,null,"\xc3\xa9"]}}'
    assert received(sealed(body)) == Frame(kind="a", values={"a": [1, 2.5, None, "é"]})
    assert received(sealed(body + b"blob", text_bytes=len(body))) == Frame(
        kind="a", values={"a": [1, 2.5, None, "é"]}, blob=b"blob"
    )
    assert parse_frame_text(b"[" * DEEPEST + b"]" * DEEPEST)


def test_a_frame_of_ours_can_hold_no_number_that_is_not_finite() -> None:
    near, far = socket.create_server(("127.0.0.1", 0)), None
    with near:
        far = socket.create_connection(near.getsockname())
        with far, pytest.raises(ValueError, match="not JSON compliant"):
            Wire(far, KEYS, peer="far").send("a", {"a": float("nan")})


@pytest.mark.parametrize(("kind", "values"), MESSAGES)
def test_a_damaged_message_is_refused_with_a_sentence_or_is_one(kind: type, values: dict[str, Any]) -> None:
    whole = json.loads(json.dumps(values))
    assert isinstance(parse_message(kind, whole), kind)
    refused = 0
    for damaged in mutants(whole, 60, SEED):
        try:
            assert isinstance(parse_message(kind, damaged), kind)
        except UnexpectedMessage as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 400
    assert refused >= 20


@pytest.mark.parametrize("event", EVENTS)
def test_a_damaged_event_is_refused_with_a_sentence_or_is_of_this_host(event: dict[str, Any]) -> None:
    whole = json.loads(json.dumps({"number": 1, "event": event, "sent_at_s": 1.0}))
    assert parse_event(parse_message(EventReport, whole), JOB).keys() >= event.keys()
    for damaged in mutants(whole, 60, SEED):
        try:
            found = parse_event(parse_message(EventReport, damaged), JOB)
            assert found.get("rank", 1) in (None, 1, 2) and found.get("died", 1) in (1, 2)
        except UnexpectedMessage as error:
            assert "\n" not in str(error) and len(str(error)) < 400
