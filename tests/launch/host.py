"""A host that joins a test's run, in a process of its own: prints JSON lines, the last of which says how it ended.

Called as `python -m tests.launch.host HOST:PORT LOCAL_ADDRESS [WITH_TORCH]`, with the secret in the environment.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from plait.errors import PlaitError
from plait.hosts.connection import Heartbeat
from plait.hosts.handshake import read_secret
from plait.hosts.joining import own_host_info
from plait.hosts.member import connect, serve
from plait.hosts.protocol import Nothing, Reply, RequestKind
from tests.launch.processes import ENTRIES, WITH_TORCH

HEARTBEAT = Heartbeat(period_s=0.3, lost_after_s=3.0)


@dataclass(frozen=True, kw_only=True)
class Place:
    path: str
    offset: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Pid:
    pid: int


@dataclass(frozen=True, kw_only=True)
class Key:
    key: str


READ = RequestKind(name="read", question=Place, reply=Pid, reply_blob_bytes=1 << 20)
REFUSE = RequestKind(name="refuse", question=Nothing, reply=Nothing)
BREAK = RequestKind(name="break", question=Key, reply=Nothing)


def main(join_address: str, local_address: str, torch: str = "") -> None:
    address, _, port = join_address.rpartition(":")
    try:
        wire = connect(address, int(port), read_secret(None), local_address=local_address)
        print(json.dumps({"kind": "connected"}), flush=True)
        stopped_by = serve(
            wire,
            host_info=replace(own_host_info(), name=f"host-{local_address}"),
            handlers={READ: _read, REFUSE: _refuse, BREAK: _break},
            entries=WITH_TORCH if torch else ENTRIES,
            say=_say,
            heartbeat=HEARTBEAT,
        )
        print(json.dumps({"stopped_by": stopped_by}), flush=True)
    except PlaitError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(error.exit_code)


def _say(subject: str, sentence: str) -> None:
    print(json.dumps({"said" if subject == "stop" else subject: sentence}), flush=True)


def _read(question: Place, blob: bytes) -> Reply[Pid]:
    with Path(question.path).open("rb") as file:
        file.seek(question.offset)
        return Reply(values=Pid(pid=os.getpid()), blob=file.read(question.bytes))


def _refuse(question: Nothing, blob: bytes) -> Reply[Nothing]:
    raise PlaitError("the disk is full; make room")


def _break(question: Key, blob: bytes) -> Reply[Nothing]:
    raise KeyError(question.key)


if __name__ == "__main__":
    main(*sys.argv[1:])
