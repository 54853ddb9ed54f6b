"""A supervisor in a process of its own, for tests that kill or interrupt it: prints one JSON line a message.

Called as `python -m tests.launch.alone ENTRY WORLD_SIZE`; the last line says how the job ended.
"""

from __future__ import annotations

import json
import sys

from plait.errors import PlaitError
from plait.launch.local.run import run_job
from plait.launch.values.job import Job, Message
from tests.launch.processes import ENTRIES


def main(entry: str, world_size: str) -> None:
    job = Job(entry=entry, argument="", world_size=int(world_size), threads=1)
    try:
        result = run_job(job, ENTRIES, on_message=_print)
        print(json.dumps({"stopped_by": result.stopped_by}), flush=True)
    except PlaitError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(error.exit_code)


def _print(message: Message) -> None:
    print(json.dumps({"kind": message.kind, "rank": message.rank, **message.values}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
