"""Which runs of this user train on this machine just now, in whatever folder, and what each then gets of it.

Each run holds a lock on a small file in a folder of the user's; whoever finds one unlocked knows that its run is over.
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
    """A run that trains on this machine, and what it uses of it."""

    folder: str
    workers: int
    """On this machine."""
    threads: int
    """Threads of each worker."""
    gpus: tuple[int, ...]
    """torch's numbers of the GPUs in use; none on the processor."""

    def __post_init__(self) -> None:
        if min(self.workers, self.threads) < 1 or any(gpu < 0 for gpu in self.gpus):
            raise ValueError("a run has workers with threads, and GPUs are counted from 0")

    def __str__(self) -> str:
        what = f"GPU {', '.join(map(str, self.gpus))}" if self.gpus else counted(self.threads, "thread") + " each"
        return f"{self.folder} ({counted(self.workers, 'worker')}, {what})"


def run_on_this_machine(plan: Plan, folder: Path) -> RunningRun:
    """What a plan uses of this machine, which is the first of its hosts."""
    workers = plan.workers_beside(0)
    gpus = tuple(map(plan.gpu_of, range(workers))) if plan.machines.have_accelerators else ()
    return RunningRun(folder=str(folder.resolve()), workers=workers, threads=plan.threads_of(0), gpus=gpus)


def registry_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where this user's running runs are listed: gone after a restart of the machine, and for nobody else to read."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "plait" if runtime else Path(tempfile.gettempdir()) / f"plait-{os.getuid()}"


@contextmanager
def listed_as_running(run: RunningRun, registry: Path) -> Iterator[None]:
    """List a run while the block runs. Where the registry cannot be written, it trains all the same, unlisted."""
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
    """The listed runs whose processes live; what others left behind is deleted."""
    if not _is_own(registry):
        return []
    found = (_running_run(path) for path in sorted(registry.glob("*.json")) if path.stem.isdecimal())
    return [run for run in found if run is not None]


def process_at_work(folder: Path, registry: Path) -> int | None:
    """The process that leads the run in a folder on this machine just now; None where there is none."""
    here = str(folder.resolve())
    found = sorted(registry.glob("*.json")) if _is_own(registry) else []
    for path in found:
        run = _running_run(path) if path.stem.isdecimal() else None
        if run is not None and run.folder == here:
            return int(path.stem)
    return None


def is_at_work(folder: Path, registry: Path) -> bool:
    """Whether a plait leads the run in a folder just now: by the registry, or by the lock that it holds in the folder.

    A lock of another machine, or of another container, is not seen. Nothing is locked to find out: a `plait train` that
    begins at this moment would be refused.
    """
    here = str(folder.resolve())
    return any(run.folder == here for run in running_runs(registry)) or _is_locked(folder / ".lock")


def _is_locked(path: Path) -> bool:
    """Whether a process that this one can see holds flock(2) on a file, as proc(5) lists it."""
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
    except (OSError, ValueError):  # gone since, just being written, or not ours
        pass
    return None


def _is_own(registry: Path) -> bool:
    """Whether a folder is there and no other user could have written it."""
    try:
        status = registry.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def sharing_lines(own: RunningRun, others: Sequence[RunningRun], cores: int) -> list[str]:
    """What a run must know of others on this machine, and what each of them gets; empty where there are none."""
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
        return f"GPU {named} is shared: each run gets about 1/{most} of it, and memory may not do; see run.devices"
    wanted = [run.workers * run.threads for run in (own, *others) if not run.gpus]
    if sum(wanted) <= cores:
        return f"there are enough of the {cores} cores for all of them"
    gets = [cores * want / sum(wanted) for want in wanted]
    theirs = " and ".join(f"{cores_of:.2g}" for cores_of in gets[1:])
    return (
        f"of {counted(cores, 'core')} this run gets about {gets[0]:.2g} and the other {theirs}: "
        f"steps take about {as_long_text(sum(wanted) / cores).removeprefix('about ')}"
    )
