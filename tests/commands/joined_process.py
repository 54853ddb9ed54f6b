"""A host that joins with the files of the working folder, in a process of its own; its ranks tell what plan they read.

Called as `python -m tests.commands.joined_process HOST:PORT`, with the secret in the environment.
"""

from __future__ import annotations

import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from plait.hosts.connection import Heartbeat
from plait.hosts.handshake import read_secret
from plait.hosts.job_files import JoinedHostFiles
from plait.hosts.joining import own_host_info
from plait.hosts.member import connect, serve
from plait.launch.values.job import RankContext
from plait.planner.plan_file import read_plan
from tests.entry_tables import entries_of


def tell_data(context: RankContext, argument: str) -> None:
    """Tell which prepared data this rank would read."""
    context.send("data", path=read_plan(Path(argument) / "plan.json").job.corpus)


def tell_data_later(context: RankContext, argument: str) -> None:
    """The same, once the file `go` lies beside the run's folder."""
    context.send("waits")
    while not (Path(argument) / "logs" / "go").exists():
        threading.Event().wait(0.005)
    tell_data(context, argument)


def main(join_address: str) -> None:
    address, _, port = join_address.rpartition(":")
    wire = connect(address, int(port), read_secret(None))
    with closing(JoinedHostFiles(Path.cwd(), lambda line: None)) as files:
        serve(
            wire,
            host_info=replace(own_host_info(), name="victim"),
            handlers=files.handlers,
            entries=entries_of("tests.commands.joined_process"),
            while_running=files.running,
            heartbeat=Heartbeat(period_s=0.3, lost_after_s=10.0),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
