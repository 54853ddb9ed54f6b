"""The process of one worker of a person's program: runs the file or module that this host's user named, and says how
it failed."""

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

import torch.distributed as dist

from plait.accelerator import accelerator_count
from plait.custom.process.launcher import (
    LAUNCHER,
    LESS_MEMORY,
    MODULE_VARIABLE,
    PROGRAM_VARIABLE,
    RENDEZVOUS,
    Launcher,
)
from plait.custom.seeds import seed_everything
from plait.errors import PlaitError, ProgramFailed
from plait.launch.values.failure import describe_exception
from plait.launch.values.job import RankContext
from plait.regular_file import read_regular_file

END_WAIT = timedelta(seconds=15)
"""How long a worker that is through waits for the others, which may still read what it sent."""


def main(context: RankContext, argument: str) -> None:
    """Entry of every worker of `plait run`: `argument` is JSON: the program's hash, its own arguments, the folder that
    an earlier start saved in last, and a seed, so that what it draws before plait.spread (random_split, a new model) is
    the same on every worker of this run.

    Raises PlaitError where this host's file is another one, ProgramFailed where the program raises.
    """
    asked = json.loads(argument)
    path, module = Path(os.environ[PROGRAM_VARIABLE]), os.environ.get(MODULE_VARIABLE, "")
    data = read_regular_file(path)
    if sha256(data).hexdigest() != asked["sha256"]:
        raise PlaitError(f"{path} has changed since the run began; start it again")
    os.environ[RENDEZVOUS] = context.rendezvous
    sys.argv = [str(path), *asked["arguments"]]
    sys.path.insert(0, str(Path.cwd() if module else path.parent))
    if find_spec("numpy"):
        importlib.import_module("numpy.random")  # a program may import it later, unseeded then
    seed_everything(int(asked["seed"]))
    LAUNCHER.set(Launcher(context.send, asked["saved_in"]))
    _run(compile(data, str(path), "exec", dont_inherit=True), path, module, context.rank)
    _leave_together(context)


def count_workers(context: RankContext, argument: str) -> None:
    """Entry of one process a host: tells how many workers it has devices for, one for each GPU or one in all."""
    context.send("workers", workers=max(1, accelerator_count()))


def _run(code: object, path: Path, module: str, rank: int) -> None:
    """Run the program as Python itself would, in a separate module: a file, or as `python -m` a named module."""
    main, name = ModuleType("__main__"), module or path.name
    main.__file__ = str(path)
    sys.modules["__main__"] = main
    try:
        if module:
            _be_module(main, module, path)
        exec(code, main.__dict__)  # pyright: ignore[reportArgumentType]
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ProgramFailed(f"rank {rank} of {name} ended itself with exit code {end.code}") from None
    except PlaitError:
        raise
    except BaseException as error:
        raise ProgramFailed(failure_sentence(error, path, name, rank), _own_traceback(error)) from error


def _be_module(main: ModuleType, name: str, path: Path) -> None:
    """Give `main` the package of a module, which is imported first, so that relative imports find it."""
    spec = find_spec(name)
    found = spec.origin if spec is not None else None
    if spec is None or found is None or Path(found).resolve() != path.resolve():
        raise PlaitError(f"Python imports {name} from {found}, and not from {path}; rename one of the two")
    main.__spec__, main.__package__, main.__loader__ = spec, spec.parent, spec.loader


def failure_sentence(error: BaseException, path: Path, name: str, rank: int) -> str:
    """The error and the line of the user's program that raised it."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if frame.filename == str(path)]
    who = f"rank {rank} of {name}" + (f", line {frames[-1].lineno}" if frames else "")
    text = str(error).partition("\n")[0].strip()
    described = describe_exception(error, rank)
    if described.lost_peer:
        return (
            f"{who} waited for another rank, which has ended: it raised, was killed, or left its "
            "loop earlier (a skipped step); every rank must take the same steps"
        )
    if isinstance(error, ImportError) and text == _NO_PACKAGE and stack[-1].filename == str(path):
        module, folder = _module_of(path)
        where = "" if folder == Path.cwd() else f" in the folder {folder}"
        return (
            f"{who} imports from its own package, which Python allows modules alone; type plait run -m {module}{where}"
        )
    advice = f"; {LESS_MEMORY}" if described.out_of_memory else ""
    return f"{who} failed with {type(error).__name__}{': ' if text else ''}{text}{advice}"


_NO_PACKAGE = "attempted relative import with no known parent package"
"""Python's message about `from .model import Net` in a file that it runs."""


def _module_of(path: Path) -> tuple[str, Path]:
    """The name of the module that a file is, and the folder in which Python finds it by that name: the one above its
    packages, or the current one where it is in none."""
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    if folder == path.parent:
        folder = Path.cwd() if folder != Path.cwd() and path.is_relative_to(Path.cwd()) else folder.parent
    return ".".join(path.relative_to(folder).with_suffix("").parts), folder


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
