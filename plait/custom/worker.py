"""The process of one worker of a person's program: runs the file that this host's user named, and says how it
failed."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType

import torch
import torch.distributed as dist

from plait.custom.process.variables import PROGRAM_VARIABLE, RENDEZVOUS
from plait.custom.seeds import seed_everything
from plait.errors import PlaitError, ProgramFailed
from plait.launch.values.failure import describe_exception
from plait.launch.values.job import RankContext
from plait.regular_file import read_regular_file

END_WAIT = timedelta(seconds=15)
"""How long a worker that is through waits for the others, which may still read what it sent."""


def main(context: RankContext, argument: str) -> None:
    """Entry of every worker of `plait run`: `argument` is JSON, the program's hash, its own arguments and a seed, so
    that what it draws before plait.spread (random_split, a new model) is the same on every worker of this run.

    Raises PlaitError where this host's file is another one, ProgramFailed where the program raises.
    """
    asked = json.loads(argument)
    path = Path(os.environ[PROGRAM_VARIABLE])
    data = read_regular_file(path)
    if sha256(data).hexdigest() != asked["sha256"]:
        raise PlaitError(f"{path} has changed since the run began; start it again")
    os.environ[RENDEZVOUS] = context.rendezvous
    sys.argv = [str(path), *asked["arguments"]]
    sys.path.insert(0, str(path.parent))
    if find_spec("numpy"):
        importlib.import_module("numpy.random")  # a program may import it later, unseeded then
    seed_everything(int(asked["seed"]))
    _run(compile(data, str(path), "exec", dont_inherit=True), path, context.rank)
    _leave_together(context)


def count_workers(context: RankContext, argument: str) -> None:
    """Entry of one process a host: tells how many workers it has devices for, one for each GPU or one in all."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    context.send("workers", workers=max(1, gpus))


def _run(code: object, path: Path, rank: int) -> None:
    """Run the program as Python itself would, in a module of its own."""
    module = ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    try:
        exec(code, module.__dict__)  # pyright: ignore[reportArgumentType]
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ProgramFailed(f"rank {rank} of {path.name} ended itself with exit code {end.code}") from None
    except PlaitError:
        raise
    except BaseException as error:
        raise ProgramFailed(failure_sentence(error, path, rank), _own_traceback(error)) from error


def failure_sentence(error: BaseException, path: Path, rank: int) -> str:
    """What went wrong in which line of a person's program."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = f", line {frames[-1].lineno}" if frames else ""
    text = str(error).partition("\n")[0].strip()
    if describe_exception(error, rank).lost_peer:
        return (
            f"rank {rank} of {path.name}{line} waited for another rank, which has ended: it raised, was killed, or "
            f"left its "
            "loop earlier (a skipped step); every rank must take the same steps"
        )
    return f"rank {rank} of {path.name}{line} failed with {type(error).__name__}{': ' if text else ''}{text}"


def _own_traceback(error: BaseException) -> str:
    """The traceback without what is above the program."""
    here: TracebackType | None = error.__traceback__
    own = here.tb_next if here is not None else None
    return "".join(traceback.format_exception(type(error), error, own))


def _leave_together(context: RankContext) -> None:
    """Wait a moment for the others: a worker that has gone looks like one that failed. Rank 0, with which the store
    goes, leaves last."""
    if not dist.is_initialized():
        return
    deadline = time.monotonic() + END_WAIT.total_seconds()
    ranks = range(context.world_size)
    _tell_and_await(f"through-{context.rank}", [f"through-{rank}" for rank in ranks], deadline)
    awaited = [f"leaves-{rank}" for rank in ranks[1:]] if context.rank == 0 else []
    _tell_and_await(f"leaves-{context.rank}", awaited, deadline)


def _tell_and_await(key: str, awaited: Sequence[str], deadline: float) -> None:
    """Set a key of the default group's store, and block until those of others are set, too, or until the deadline."""
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    store.set(key, "1")
    while awaited and not store.check(list(awaited)) and time.monotonic() < deadline:
        time.sleep(0.01)
