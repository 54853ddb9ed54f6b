"""What became of a job that was submitted, by one name whatever scheduler has it: state, output, end, files."""

from __future__ import annotations

import json
from collections.abc import Iterator

from plait.commands.monitoring.finish import is_finished, print_finished
from plait.commands.planning.run_folder import RunFolder, run_folder
from plait.commands.submitting.kubernetes import (
    copy_from_kubernetes,
    end_in_kubernetes,
    kubernetes_log_lines,
    kubernetes_state,
)
from plait.commands.submitting.over_ssh.sending import copy_by_ssh, end_by_ssh, ssh_log_lines, ssh_state
from plait.commands.submitting.records import Submitted, find_record, record_if_any
from plait.commands.submitting.slurm import end_in_slurm, slurm_log_lines, slurm_state
from plait.errors import PlaitError
from plait.private_folder import make_private_folder
from plait.report.atomic import replace_file
from plait.screen.screen import Screen
from plait.working_folder import CURRENT_FOLDER, WorkingFolder


def job_state_line(name: str, working: WorkingFolder = CURRENT_FOLDER) -> str | None:
    """Where a submitted job stands by its scheduler's account; None where no job of that name was submitted."""
    record = record_if_any(name, working)
    return None if record is None else f"job      {name} on {record.scheduler}: {_state(record)}"


def _state(record: Submitted) -> str:
    match record.scheduler:
        case "slurm":
            return f"job {record.job}, {' '.join(slurm_state(record)).strip()}"
        case "ssh":
            return ssh_state(record)
        case _:
            return kubernetes_state(record)


def job_log_lines(name: str, working: WorkingFolder = CURRENT_FOLDER) -> Iterator[str]:
    """What its first node printed so far; raises PlaitError where no such job was submitted."""
    record = find_record(name, working)
    match record.scheduler:
        case "slurm":
            yield from slurm_log_lines(record, working)
        case "ssh":
            yield from ssh_log_lines(record)
        case _:
            yield from kubernetes_log_lines(record)


def end_job(name: str, working: WorkingFolder = CURRENT_FOLDER) -> str:
    """End a job, and say how it goes on."""
    record = find_record(name, working)
    match record.scheduler:
        case "slurm":
            end_in_slurm(record)
        case "ssh":
            end_by_ssh(record)
        case _:
            end_in_kubernetes(record)
    return f"stopped  {name}; the same plait submit goes on with it"


FETCHED_MARK = "fetched.json"
"""In a run's folder: that it is a copy, which may be copied anew."""


def _copy(record: Submitted, folder: RunFolder, working: WorkingFolder, screen: Screen) -> None:
    mark, inside = folder.path / FETCHED_MARK, folder.path.relative_to(working.path)
    if folder.path.exists() and not mark.exists():
        raise PlaitError(f"{folder.path} here is a run of its own, which would be overwritten; move it elsewhere first")
    make_private_folder(folder.path)
    # Before the copy: one that broke off is known as a copy, too.
    replace_file(mark, f"{json.dumps({'from': record.scheduler, 'machines': record.machines})}\n".encode())
    try:
        if record.scheduler == "ssh":
            copy_by_ssh(record, inside, working)
        else:
            copy_from_kubernetes(record, inside, working, screen)
    except BaseException:
        if list(folder.path.iterdir()) == [mark]:
            mark.unlink()
            folder.path.rmdir()
        raise


def fetch_job(name: str, screen: Screen, working: WorkingFolder = CURRENT_FOLDER) -> None:
    """Copy a job's run into runs/ here, unless it is here already, and print its receipt or where it stands."""
    record = find_record(name, working)
    folder = run_folder(name, working)
    if record.scheduler != "slurm":
        _copy(record, folder, working, screen)
    if not folder.has_begun:
        raise PlaitError(f"{name} has not begun to train: {_state(record)}; see plait logs {name}")
    if is_finished(folder):
        print_finished(folder, screen, ())
    else:
        screen.print(f"fetched  {folder.path}; it is not finished: plait status {name}")
