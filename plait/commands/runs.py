"""Existing runs from Python: their recipes, plans, results and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any, Literal

from plait.arguments import check_arguments, texts_of, with_known_keywords
from plait.checked_json import printable
from plait.checkpoint.store import published_checkpoints
from plait.commands.monitoring.finish import run_end
from plait.commands.planning.output_files import check_output_file, write_output_file
from plait.commands.python_call import in_call_words
from plait.errors import PlaitError, installing
from plait.planner.plan import Plan
from plait.recipe.schema import RunConfig
from plait.report.metrics import read_metrics
from plait.report.receipt import Receipt
from plait.report.receipt_file import read_receipt
from plait.run_files.account import RunAccount, account_of
from plait.run_files.comparing import compare_folders
from plait.run_files.comparison import RunComparison
from plait.run_files.report_files import report_html, report_markdown
from plait.run_files.run_report import run_report
from plait.run_files.summary import RunSummary, run_summaries
from plait.run_folder import find_run
from plait.working_folder import named_folder

MetricsForm = Literal["auto", "list", "frame"]
"""A list of dicts, a pandas DataFrame, or "auto": a DataFrame if pandas is installed, else a list."""


class Run:
    """A run, by name or folder; `folder` contains runs/, and is the current folder by default.

    Every property reads the run's files again, so it stays current while the run trains.

    Raises PlaitError if there is no such run, or a file of it is damaged.
    """

    def __init__(self, run: str | Path, *, folder: str | Path | None = None) -> None:
        check_arguments(run=run)
        self._folder = find_run(str(run), named_folder(folder))

    @property
    def name(self) -> str:
        return self._folder.path.resolve().name

    @property
    def path(self) -> Path:
        """The folder with the run's files."""
        return self._folder.path

    @property
    def recipe(self) -> RunConfig:
        """The complete recipe, as the run was started or last changed."""
        return self._folder.saved_config()

    @property
    def plan(self) -> Plan:
        """The plan of the run: layout, steps, batch, forecast."""
        return self._folder.saved_plan()

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the finished run; None while steps remain, for example after `train.budget` was raised."""
        return read_receipt(self._folder.receipt) if self._folder.is_finished else None

    @property
    def checkpoints(self) -> Sequence[Path]:
        """The folders of the saved checkpoints, oldest first."""
        return published_checkpoints(self._folder.checkpoints)

    @property
    def account(self) -> RunAccount:
        """How the run spent its time, and its failures, as in `plait status`."""
        return account_of(self._folder)

    def metrics(self, form: MetricsForm = "auto") -> Any:
        """One row per step, with the keys of metrics.jsonl, including those of an evaluation where there was one.

        A list of dicts, or a pandas DataFrame: see MetricsForm.
        """
        steps, evaluations = read_metrics(self._folder.metrics)
        rows = {report.step: asdict(report) for report in steps}
        for evaluation in evaluations:
            rows.setdefault(evaluation.step, {}).update(asdict(evaluation))
        return _in_form(list(rows.values()), form)

    def __repr__(self) -> str:
        return f"Run({self.name!r})"

    def __str__(self) -> str:
        """For a finished run its end as `plait train` prints it; for others, their progress."""
        steps, _ = read_metrics(self._folder.metrics)
        if receipt := self.receipt:
            return in_call_words(run_end(receipt, self.path, [report.loss for report in steps], "utf-8"))
        loss = f", loss {steps[-1].loss:.3f}" if steps else ""
        return printable(f"run      {self.path}: step {steps[-1].step if steps else 0} of {self.plan.job.steps}{loss}")

    def _repr_html_(self) -> str:
        """The run as a notebook shows it."""
        return f"<pre>{escape(str(self))}</pre>"


@with_known_keywords()
def runs(*, folder: str | Path | None = None) -> list[RunSummary]:
    """All runs below `folder`/runs, the most recently changed first, with their progress and the command that continues
    each. A run that cannot be read is included, with the reason in `problem`. plait.Run(name) has the rest."""
    return run_summaries(named_folder(folder))


@with_known_keywords()
def compare_runs(first: str | Path, second: str | Path, *, folder: str | Path | None = None) -> RunComparison:
    """Compare two runs, by name or folder: which has the lower loss and by how much beyond the noise of seeds, which is
    faster, and which of their differences can explain it. Raises PlaitError if one of them cannot be read."""
    for run in (first, second):
        check_arguments(run=run)
    working = named_folder(folder)
    return compare_folders(find_run(str(first), working), find_run(str(second), working), working)


@with_known_keywords()
def write_report(
    runs: str | Path | Sequence[str | Path],
    *,
    html: str | Path | None = None,
    md: str | Path | None = None,
    folder: str | Path | None = None,
) -> list[Path]:
    """Write a report of one or several runs into one file: a page (`html`), a Markdown text (`md`), or both. Returns
    the paths. Raises PlaitError if a run cannot be read or a file cannot be written."""
    check_arguments(html=html, md=md)
    working = named_folder(folder)
    files = {kind: Path(file) for kind, file in (("html", html), ("md", md)) if file is not None}
    names = list(dict.fromkeys(texts_of("runs", runs)))
    if not files or not names:
        raise PlaitError("a report needs runs and a file; give html=, md=, or both")
    for file in files.values():
        check_output_file(file)
    report = run_report([find_run(name, working) for name in names], working)
    texts = {"html": report_html, "md": report_markdown}
    for kind, file in files.items():
        write_output_file(file, texts[kind](report))
    return list(files.values())


def _in_form(rows: list[dict[str, Any]], form: MetricsForm) -> Any:
    check_arguments(form=form)
    if form == "list":
        return rows
    try:
        from pandas import DataFrame
    except ImportError:
        if form == "auto":
            return rows
        raise PlaitError(f"metrics as a frame need pandas; {installing('pandas')}") from None
    return DataFrame(rows)
