"""This user's runs that are training on this machine now, in any folder, and the share of it that each gets.

Each run holds a lock on a small file in a folder of the user; an unlocked file means that its run is over.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.checked_json import parse_object, typed_value
from plait.planner.plan import Plan
from plait.private_folder import make_private_folder
from plait.units import as_long_text, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRun:
    """A run that is training on this machine, and its use of the machine."""

    folder: str
    workers: int
    """On this machine."""
    threads: int
    """Threads of each worker."""
    gpus: tuple[int, ...]
    """torch's numbers of the GPUs in use; empty on CPUs."""

    def __post_init__(self) -> None:
        if min(self.workers, self.threads) < 1 or any(gpu < 0 for gpu in self.gpus):
            raise ValueError("a run has workers with threads, and GPUs are counted from 0")

    def __str__(self) -> str:
        what = f"GPU {', '.join(map(str, self.gpus))}" if self.gpus else counted(self.threads, "thread") + " each"
        return f"{self.folder} ({counted(self.workers, 'worker')}, {what})"


def run_on_this_machine(plan: Plan, folder: Path) -> RunningRun:
    """A plan's use of this machine, which is the first of its hosts."""
    workers = plan.workers_beside(0)
    gpus = tuple(map(plan.gpu_of, range(workers))) if plan.machines.have_accelerators else ()
    return RunningRun(folder=str(folder.resolve()), workers=workers, threads=plan.threads_of(0), gpus=gpus)


def registry_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder that lists this user's active runs: deleted when the machine restarts, and unreadable for others."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "plait" if runtime else Path(tempfile.gettempdir()) / f"plait-{os.getuid()}"


@contextmanager
def listed_as_running(run: RunningRun, registry: Path) -> Iterator[None]:
    """List a run while the block runs. If the registry cannot be written, the run trains unlisted."""
    path = registry / f"{os.getpid()}.json"
    try:
        make_private_folder(registry)
        file = path.open("w") if _is_own(registry) else None
    except OSError:
        file = None
    if file is None:
        yield
        return
    with file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(json.dumps(asdict(run)))
            file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def running_runs(registry: Path) -> list[RunningRun]:
    """The listed runs whose processes are alive; entries of dead ones are deleted."""
    if not _is_own(registry):
        return []
    found = (_running_run(path) for path in sorted(registry.glob("*.json")) if path.stem.isdecimal())
    return [run for run in found if run is not None]


def process_at_work(folder: Path, registry: Path) -> int | None:
    """The process that leads the run in a folder on this machine now; None if there is none."""
    here = str(folder.resolve())
    found = sorted(registry.glob("*.json")) if _is_own(registry) else []
    for path in found:
        run = _running_run(path) if path.stem.isdecimal() else None
        if run is not None and run.folder == here:
            return int(path.stem)
    return None


def is_at_work(folder: Path, registry: Path) -> bool:
    """Whether a plait process leads the run in a folder now, according to the registry or to its lock in the folder.

    Locks of other machines or containers are not visible. This does not lock anything, since that could make a `plait
    train` fail that starts at this moment.
    """
    here = str(folder.resolve())
    return any(run.folder == here for run in running_runs(registry)) or _is_locked(folder / ".lock")


def _is_locked(path: Path) -> bool:
    """Whether a process visible to this one holds flock(2) on a file, as listed in proc(5)."""
    try:
        file, locks = path.stat(), Path("/proc/locks").read_text()
    except OSError:
        return False
    name = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    fields = [line.split() for line in locks.splitlines()]
    return any(one[1] == "FLOCK" and name in one for one in fields if len(one) > 1)


def _running_run(path: Path) -> RunningRun | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return typed_value(RunningRun, parse_object(file.read()))
            path.unlink()
    except (OSError, ValueError):  # gone meanwhile, being written, or not ours
        pass
    return None


def _is_own(registry: Path) -> bool:
    """Whether a folder exists and no other user could have written it."""
    try:
        status = registry.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def sharing_lines(own: RunningRun, others: Sequence[RunningRun], cores: int) -> list[str]:
    """A warning about other runs on this machine, with the share that each gets; empty if there are none."""
    if not others:
        return []
    listed = " and ".join(map(str, others))
    verb = "trains" if len(others) == 1 else "train"
    return [f"this machine is training already: {listed} {verb} here", _shares_text(own, others, cores)]


def _shares_text(own: RunningRun, others: Sequence[RunningRun], cores: int) -> str:
    if own.gpus:
        shared = sorted({gpu for other in others for gpu in other.gpus} & set(own.gpus))
        if not shared:
            return "they use other devices than this run"
        most = 1 + max(sum(gpu in other.gpus for other in others) for gpu in shared)
        named = ", ".join(map(str, shared))
        return f"GPU {named} is shared: each run gets about 1/{most} of it, and memory may not suffice; see run.devices"
    wanted = [run.workers * run.threads for run in (own, *others) if not run.gpus]
    if sum(wanted) <= cores:
        return f"there are enough of the {cores} cores for all of them"
    gets = [cores * want / sum(wanted) for want in wanted]
    theirs = " and ".join(f"{cores_of:.2g}" for cores_of in gets[1:])
    return (
        f"of {counted(cores, 'core')} this run gets about {gets[0]:.2g} and the other {theirs}: "
        f"steps take about {as_long_text(sum(wanted) / cores).removeprefix('about ')}"
    )
