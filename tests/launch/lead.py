"""Host 0 in a process of its own, for tests that kill it: prints where to join, then a JSON line a message.

Called as `python -m tests.launch.lead ENTRY`, with the secret of one other host in the environment.
"""

from __future__ import annotations

import json
import sys

from plait.errors import PlaitError
from plait.hosts.handshake import read_secret
from plait.hosts.leader import HostPart, Hosts
from plait.launch.values.job import Job, Message
from tests.launch.host import HEARTBEAT
from tests.launch.processes import ENTRIES, anybody


def main(entry: str) -> None:
    job = Job(entry=entry, argument="", world_size=2, threads=1)
    part = HostPart(ranks=1, threads=1, argument="")
    try:
        with Hosts(
            address="127.0.0.1", secret=read_secret(None), members=1, entries=ENTRIES, heartbeat=HEARTBEAT
        ) as hosts:
            print(json.dumps({"join": hosts.join_address}), flush=True)
            hosts.membership.admit(anybody, within_s=30)
            result = hosts.run(job, on_message=_print, parts=[part, part])
            print(json.dumps({"stopped_by": result.stopped_by}), flush=True)
    except PlaitError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(error.exit_code)


def _print(message: Message) -> None:
    print(json.dumps({"kind": message.kind, "rank": message.rank, **message.values}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
