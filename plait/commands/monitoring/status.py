"""`plait status`: a run's progress, the use of its time, and the samples of its steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Literal

from plait.report.bottleneck import bottleneck_rows
from plait.report.incidents import Incident
from plait.run_files.account import TIME_IN_WORDS, RunAccount, account_of, ledger_of
from plait.run_folder import RunFolder, find_run
from plait.units import counted, format_duration
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

StatusForm = Literal["text", "json"]
StatusDetail = Literal["account", "ledger"]
_WORTH_SAYING = 0.0005


def status(
    run: str, *, form: StatusForm = "text", detail: StatusDetail = "account", working: WorkingFolder = CURRENT_FOLDER
) -> Iterator[str]:
    """The lines of a run's status, by name or folder; raises PlaitError if there is no such run, or a file of it is
    damaged."""
    folder = find_run(run, working)
    account = account_of(folder)
    if form == "json":
        ledger = {"ledger": [asdict(line) for line in ledger_of(folder)]} if detail == "ledger" else {}
        yield json.dumps(account.to_dict() | ledger)
    elif detail == "ledger":
        yield from _ledger_lines(folder, account)
    else:
        yield from status_lines(account)


def status_lines(account: RunAccount) -> Iterator[str]:
    """An account in a few printed lines."""
    yield (
        f"status   {account.run}: {account.state}, step {account.step} of {account.steps}; {saved_text(account)}; "
        f"{counted(account.starts, 'start')}, {counted(len(account.incidents), 'failure')}"
    )
    if account.wall_s:
        shares = {name: seconds / account.wall_s for name, seconds in account.seconds.items()}
        parts = [f"{share:.1%} {TIME_IN_WORDS[name]}" for name, share in shares.items() if share >= _WORTH_SAYING]
        yield f"time     {format_duration(account.wall_s)}: {', '.join(parts)}"
    yield from bottleneck_rows(account.bottleneck)
    if account.lost_by_cause:
        causes = [f"{format_duration(seconds)} {cause}" for cause, seconds in account.lost_by_cause.items()]
        yield f"lost     by the causes of failures: {', '.join(causes)}"
    yield from map(_incident_line, account.incidents)
    yield f"samples  {_samples_text(account)}"


def saved_text(account: RunAccount) -> str:
    """The saved step and its age; for a finished run, only the step."""
    if account.step_saved is None or account.saved_at is None:
        return "nothing saved yet"
    age_s = (datetime.now(UTC) - account.saved_at).total_seconds()
    ago = "" if account.state == "finished" else f" {format_duration(age_s)} ago"
    return f"step {account.step_saved} saved{ago}" if age_s >= 0 else f"step {account.step_saved} saved"


def _incident_line(incident: Incident) -> str:
    where = "copies in memory" if incident.from_copies else "the checkpoint" if incident.resumed_from else ""
    again = f"went on from {where} of step {incident.resumed_from}" if where else "went on from the beginning"
    then = {"started again": again, "ended": "ended", "gave up": "gave up"}
    lost = f", {counted(incident.steps_lost, 'step')} done again" if incident.steps_lost else ""
    at = incident.at.partition(".")[0].replace("T", " ")
    return f"failure  {at} UTC, after step {incident.step}: {incident.sentence}; {then[incident.decision]}{lost}"


def _samples_text(account: RunAccount) -> str:
    if account.samples_lost or account.samples_repeated:
        return f"{account.samples_lost} lost, {account.samples_repeated} counted twice"
    text = "none lost, none counted twice"
    if account.skipped:
        text += f", {account.samples_skipped} skipped on purpose"
    if account.checked_checkpoints:
        text += f"; the cursors of {counted(len(account.checked_checkpoints), 'checkpoint')} agree"
    return text


def _ledger_lines(folder: RunFolder, account: RunAccount) -> Iterator[str]:
    """A table: for each step the first and last position in the run's order of data, the tokens that counted, and the
    number of the start that took it. Skipped samples have their own lines, before the step's."""
    plan = folder.saved_plan()
    seed, each = folder.saved_config().run.seed, f"{plan.job.batch_sequences} sequences of {plan.job.sequence}"
    yield f"# seed {seed}, text {plan.job.corpus_hash}, {each} a step"
    yield "step\tfirst\tlast\ttokens\tstart"
    skipped = {one.step: one for one in account.skipped}
    for line in ledger_of(folder):
        if one := skipped.get(line.step):
            yield f"skipped\t{one.first}\t{one.last}\t0\t{line.generation}"
        yield f"{line.step}\t{line.first}\t{line.last}\t{line.tokens}\t{line.generation}"
    yield f"# {_samples_text(account)}"
