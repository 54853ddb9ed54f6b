"""What was submitted, by name: `.plait/submitted/NAME.json`, so that it can be watched, ended and brought back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.checked_json import parse_object, typed_value
from plait.errors import PlaitError
from plait.private_folder import make_private_folder
from plait.regular_file import read_regular_file
from plait.report.atomic import replace_file
from plait.working_folder import CURRENT_FOLDER, WorkingFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """One job that was sent to a scheduler or to machines."""

    name: str
    """The run's, or the program's without ".py"."""
    label: str
    """As the scheduler knows it."""
    scheduler: str
    """ "slurm", "ssh" or "kubernetes"."""
    job: str = ""
    """Slurm's number of the job, or the kind of the object in Kubernetes."""
    namespace: str = ""
    image: str = ""
    """The image of its pods."""
    volume: str = ""
    """The claim of the volume that they work on."""
    machines: tuple[str, ...] = ()
    """Names that ssh takes."""
    folder: str = ""
    """Where it works on those machines."""


def record_file(name: str, working: WorkingFolder = CURRENT_FOLDER) -> Path:
    """Where a job's record lies."""
    return working.cache / "submitted" / f"{name}.json"


def keep_record(record: Submitted, working: WorkingFolder = CURRENT_FOLDER) -> None:
    """Write a job's record; an earlier one of that name is replaced."""
    file = record_file(record.name, working)
    make_private_folder(file.parent)
    replace_file(file, f"{json.dumps(asdict(record), indent=2)}\n".encode())


def find_record(name: str, working: WorkingFolder = CURRENT_FOLDER) -> Submitted:
    """The record of a submitted job; raises PlaitError where there is none."""
    found = record_if_any(name, working)
    if found is not None:
        return found
    known = sorted(path.stem for path in (working.cache / "submitted").glob("*.json"))
    hint = (
        f"those that were: {', '.join(known[:10])}" if known else "submit it by plait submit, or look by plait status"
    )
    raise PlaitError(f'no job "{name}" was submitted from this folder; {hint}')


def record_if_any(name: str, working: WorkingFolder = CURRENT_FOLDER) -> Submitted | None:
    """The record of a submitted job; None where there is none. Raises PlaitError for a damaged one."""
    file = record_file(name, working)
    if "/" in name or not file.is_file():
        return None
    try:
        return typed_value(Submitted, parse_object(read_regular_file(file)))
    except (OSError, ValueError) as error:
        raise PlaitError(f"{file} is damaged ({error}); remove it, and look after the job by the scheduler") from None
