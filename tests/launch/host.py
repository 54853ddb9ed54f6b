"""A host that joins a test's run, in a process of its own: prints JSON lines, the last of which says how it ended.

Called as `python -m tests.launch.host HOST:PORT LOCAL_ADDRESS [WITH_TORCH]`, with the secret in the environment.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from plait.errors import PlaitError
from plait.hosts.connection import Heartbeat, Reply
from plait.hosts.handshake import read_secret
from plait.hosts.member import connect, serve
from plait.hosts.wire import Frame
from tests.launch.processes import ENTRIES, WITH_TORCH

HEARTBEAT = Heartbeat(period_s=0.3, lost_after_s=3.0)


def main(join_address: str, local_address: str, torch: str = "") -> None:
    address, _, port = join_address.rpartition(":")
    try:
        wire = connect(address, int(port), read_secret(None), local_address=local_address)
        print(json.dumps({"kind": "connected"}), flush=True)
        stopped_by = serve(
            wire,
            host_info={"name": f"host-{local_address}", "pid": os.getpid()},
            handlers={"read": _read, "refuse": _refuse, "break": _break},
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


def _read(question: Frame) -> Reply:
    with Path(question.values["path"]).open("rb") as file:
        file.seek(question.values["offset"])
        return Reply(values={"pid": os.getpid()}, blob=file.read(question.values["bytes"]))


def _refuse(question: Frame) -> Reply:
    raise PlaitError("the disk is full; make room")


def _break(question: Frame) -> Reply:
    raise KeyError(question.values["key"])


if __name__ == "__main__":
    main(*sys.argv[1:])
