"""Deletes a run's folder: never while it runs, never one that another run needs, never through a link."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, RunFailed
from plait.private_folder import CACHE, RUNS
from plait.regular_file import append_to_file, read_regular_text
from plait.run_files.running_runs import is_at_work, process_at_work, registry_folder
from plait.run_files.summary import run_paths
from plait.run_folder import find_run, hold_lock
from plait.units import counted, format_bytes
from plait.working_folder import WorkingFolder

_OWN_FILES = re.compile(
    r"\..*|recipe\.toml|(plan|receipt|so-far|joined|fetched|timeline-request|timeline-answer)\.json|plan-\d+\.json|shares(-\d+)?\.jsonl"
    r"|(metrics|starts|incidents|rank-times)\.jsonl|checkpoints|tensorboard|logs|base|chat_template\.jinja"
)
"""Names that plait itself creates in a run's folder."""
_REMOVED = re.compile(r"\..+\.removed-\d+(-\d+)?")
# Note [removal]: the folder is first renamed to a name that no command takes for a run, with its lock held, and then
# deleted. A removal that is killed in between leaves that folder, which the next removal deletes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """The consequences of deleting a run."""

    path: Path
    n_files: int
    n_bytes: int
    n_checkpoints: int
    other_files: Sequence[str]
    """Names of files and folders in it that plait did not make."""
    links: Sequence[str]
    """Targets of links in it, which are kept."""

    def lines(self) -> list[str]:
        """What is deleted and what is kept, for the user's confirmation."""
        what = f"{counted(self.n_files, 'file', ',')}, {format_bytes(self.n_bytes)}"
        lines = [f"remove   {self.path}: {counted(self.n_checkpoints, 'checkpoint')}, {what}"]
        if self.other_files:
            lines.append(f"         with what plait did not make: {', '.join(self.other_files)}")
        if self.links:
            lines.append(f"         links go, what they lead to stays: {', '.join(self.links)}")
        return lines


def removal_of(run: str, working: WorkingFolder) -> Removal:
    """The consequences of deleting a run; raises PlaitError if there is none, or if it may not be deleted."""
    path = _named_folder(run, working)
    _refuse_at_work(path)
    if users := users_of(path, working):
        raise PlaitError(f"{path} is needed by {' and '.join(users)}; remove what needs it first")
    files, n_bytes, links = 0, 0, list[str]()
    for folder, folders, names in os.walk(path):
        for entry in (Path(folder, name) for name in (*folders, *names)):
            if entry.is_symlink():
                links.append(str(entry.resolve()))
        for name in names:
            with suppress(OSError):
                files, n_bytes = files + 1, n_bytes + os.lstat(Path(folder, name)).st_size
    names = sorted(one.name for one in path.iterdir()) if os.access(path, os.R_OK) else []
    return Removal(
        path=path,
        n_files=files,
        n_bytes=n_bytes,
        n_checkpoints=len(list((path / "checkpoints").glob("step-*"))),
        other_files=[name for name in names if not _OWN_FILES.fullmatch(name)],
        links=sorted(links),
    )


def _named_folder(run: str, working: WorkingFolder) -> Path:
    """The folder below runs/ that a name or path refers to; raises PlaitError for any other."""
    place = working.path / run if "/" in run.rstrip("/") else working.runs / run
    known = {path.name for path in run_paths(working)}
    if place.name not in known or place.parent.resolve() != working.runs.resolve():
        found = find_run(run, working)
        raise PlaitError(f"{found.path} is not in {working.runs.absolute()}; go to the folder that its runs/ lies in")
    path = working.runs / place.name
    if path.is_symlink():
        raise PlaitError(f"{path} is a link to {path.resolve()}; delete that folder yourself, then the link")
    return path


def _refuse_at_work(path: Path) -> None:
    if is_at_work(path, registry_folder()):
        raise PlaitError(_at_work_text(path))


def _at_work_text(path: Path) -> str:
    return f"{path} is training just now; stop it first (Ctrl-C, or kill its plait train), then remove it"


def remove_run(removal: Removal, working: WorkingFolder) -> None:
    """Delete the run, and the remains of removals that were killed. Raises PlaitError, with nothing changed, if the run
    is active or its folder cannot be renamed; RunFailed if the run is gone but not all of it could be deleted."""
    path = removal.path
    try:
        lock = append_to_file(path / ".lock")
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise PlaitError(f"{path} is gone already") from None
        raise _cannot_remove(path, error) from None
    with lock:
        hold_lock(lock, _at_work_text(path))
        if process_at_work(path, registry_folder()) is not None:  # its lock may have been deleted
            raise PlaitError(_at_work_text(path))
        try:
            aside = next(name for name in _names_aside(path) if not os.path.lexists(name))
            path.rename(aside)
        except OSError as error:
            raise _cannot_remove(path, error) from None
    _delete(aside)
    for left in working.runs.iterdir():
        if _REMOVED.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
            with suppress(RunFailed):
                _delete(left)


def _names_aside(path: Path) -> Iterator[Path]:
    for number in count():
        yield path.with_name(f".{path.name}.removed-{os.getpid()}{f'-{number}' if number else ''}")


def _delete(aside: Path) -> None:
    """Delete a folder and its contents; of a link only the link itself."""
    shutil.rmtree(aside, ignore_errors=True)
    if os.path.lexists(aside):
        raise RunFailed(
            f"the run is gone, but not all of {aside} could be deleted; check its permissions and delete it"
        )


def _cannot_remove(path: Path, error: OSError) -> PlaitError:
    return PlaitError(
        f"{path} cannot be removed ({error.strerror}); check the permissions of {path.parent} and the disk"
    )


def users_of(path: Path, working: WorkingFolder) -> list[str]:
    """The other runs of a working folder, and the recipes in it, that use a file of this run as their starting model,
    as text, or as tokenizer; in words."""
    target = path.resolve()
    runs = [
        f"the run {other.name}"
        for other in run_paths(working)
        if other.resolve() != target and _run_uses(other, target, working)
    ]
    recipes = [
        f"the recipe {recipe.relative_to(working.path)}"
        for recipe in sorted((*working.path.glob("*.toml"), *working.path.glob("*/*.toml")))
        if recipe.relative_to(working.path).parts[0] not in (RUNS, CACHE) and _file_names(recipe, target, working)
    ]
    return [*runs, *recipes]


def _run_uses(other: Path, target: Path, working: WorkingFolder) -> bool:
    links = list[Path]()
    with suppress(OSError):  # deleted meanwhile, or closed to this user
        links = [entry for entry in other.iterdir() if entry.is_symlink()]
    if any(entry.resolve().is_relative_to(target) for entry in links):
        return True
    return any(_file_names(other / name, target, working) for name in ("recipe.toml", "plan.json"))


def _file_names(file: Path, target: Path, working: WorkingFolder) -> bool:
    """Whether a recipe or plan names a path inside a folder; also for damaged files and other versions."""
    try:
        text = read_regular_text(file)
    except (OSError, ValueError):
        return False
    try:
        values: Any = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError):
        return f"{target}/" in text or f'{target}"' in text
    return any(_leads_into(one, (file.parent, working.path), target, working) for one in _texts(values))


def _leads_into(text: str, bases: Sequence[Path], target: Path, working: WorkingFolder) -> bool:
    if text.startswith("run:"):
        return (working.runs / text.removeprefix("run:")).resolve().is_relative_to(target)
    bare = text.removeprefix("hf:").partition(":")[0] if text.startswith("hf:") else text
    with suppress(OSError, ValueError, RuntimeError):  # not a path at all, or in the home of an unknown user
        return any((base / Path(bare).expanduser()).resolve().is_relative_to(target) for base in bases)
    return False


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, dict | list):
        for inner in values.values() if isinstance(values, dict) else values:
            yield from _texts(inner)
