"""The process of one rank of a program that `plait check` watches: sets the watch up, then runs the program as Python
itself would."""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from plait.checking.watch.call_site import is_library
from plait.checking.watch.data import DataWatch
from plait.checking.watch.gradients import GradientWatch
from plait.checking.watch.journal import Journal
from plait.checking.watch.messages import MessageWatch
from plait.checking.watch.on_processors import ProcessorStandIns
from plait.launch.local.guard import die_with_parent


def run_rank(request: Path) -> None:
    """Run the program named in a JSON file in this process, as the rank that the environment gives."""
    requested = json.loads(request.read_text(encoding="utf-8"))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    die_with_parent(int(requested["parent"]))
    folder, working = Path(requested["folder"]), str(requested["working"])
    journal = Journal(folder / f"rank-{rank}")
    gradients = GradientWatch(
        journal, int(requested["steps"]), stop_after=requested["stop_after"], keeps_states=bool(working)
    )
    stand_ins = ProcessorStandIns(journal, rank, size, folder / "outputs", Path(working) if working else None)
    if working:
        os.chdir(working)
        stand_ins.keep_linked_files()
    stand_ins.install()
    gradients.install()
    DataWatch(journal).install()
    MessageWatch(journal, gradients).install()
    name, is_module = str(requested["program"]), requested["kind"] == "module"
    sys.argv = [name, *requested["arguments"]]
    try:
        if is_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(name).resolve().parent))
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            journal.write("failed", error=f"it exited with code {end.code}", site="")
            raise
    except BaseException as error:
        own = [one for one in traceback.extract_tb(error.__traceback__) if not is_library(one.filename)]
        site = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
        text = str(error).partition("\n")[0].strip()
        journal.write("failed", error=f"{type(error).__name__}: {text}" if text else type(error).__name__, site=site)
        raise
    journal.write("ended", schedules=gradients.scheduler_states())


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
