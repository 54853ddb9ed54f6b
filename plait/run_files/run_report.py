"""A report of one run or several, as values: what was asked, planned, learned and measured, and how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import tomli_w

from plait.errors import PlaitError
from plait.planner.plan import Plan
from plait.recipe.load import flat_values
from plait.report.metrics import EvalReport, StepReport, read_metrics
from plait.report.receipt import ITEM_NAMES, WORTH_NAMING, Receipt, receipt_rows
from plait.report.receipt_file import read_receipt
from plait.report.samples_file import SampleReport, read_samples
from plait.run_files.account import TIME_IN_WORDS, RunAccount, account_of
from plait.run_files.comparing import compare_folders, versions_of
from plait.run_files.comparison import comparison_lines
from plait.run_files.repeating import settings_to_repeat
from plait.run_files.summary import RunSummary, summary_of
from plait.run_files.table import loss_text
from plait.run_folder import RunFolder
from plait.units import counted, format_bytes, format_count, format_duration
from plait.working_folder import WorkingFolder

CURVE_POINTS = 300
"""Points per curve, each the mean of as many steps as needed."""
_SPARKLINE_COLUMNS = 60
_LEAST_SHARE = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """A table's titles and rows."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """A run's losses as a function of training tokens."""

    name: str
    steps: Sequence[tuple[int, float]]
    """Tokens, and the mean training loss of the steps up to them."""
    held_out: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPart:
    """A part of a report, in the order in which it is shown: words, facts, a table, a picture, text to copy."""

    title: str
    lines: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    facts_as: Literal["list", "tiles"] = "list"
    table: ReportTable | None = None
    curves: Sequence[LossCurve] = ()
    bars: Sequence[tuple[str, float, float]] = ()
    """Items of a step with their forecast and measured seconds."""
    points: Sequence[str] = ()
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A report of one run or several, as values."""

    title: str
    sections: Sequence[tuple[str, Sequence[ReportPart]]]
    """Chapters: one over all runs where there are several, then one for each run."""
    folder: Path
    """The working folder: paths in it are shown relative to it."""


def run_report(folders: Sequence[RunFolder], working: WorkingFolder) -> RunReport:
    """The report of these runs; raises PlaitError if one of them cannot be read."""
    runs = [_read(folder, working) for folder in folders]
    names = [run.summary.name for run in runs]
    chapters: list[tuple[str, Sequence[ReportPart]]] = []
    if len(runs) > 1:
        chapters.append(("All runs", list(_shared_sections(runs, working))))
    chapters += [(f"The run {run.summary.name}", list(_sections_of(run))) for run in runs]
    title = f"The run {names[0]}" if len(runs) == 1 else f"The runs {', '.join(names[:-1])} and {names[-1]}"
    return RunReport(title=title, sections=chapters, folder=working.path.absolute())


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadRun:
    folder: RunFolder
    summary: RunSummary
    asked: Mapping[str, Any]
    """The recipe's values by key."""
    recipe: str
    """The requested settings: keys that differ from their defaults, as TOML."""
    seed: int
    plan: Plan
    account: RunAccount
    receipt: Receipt | None
    steps: Sequence[StepReport]
    evaluations: Sequence[EvalReport]
    samples: Sequence[SampleReport]


def _read(folder: RunFolder, working: WorkingFolder) -> _ReadRun:
    config, plan, account = folder.saved_config(), folder.saved_plan(), account_of(folder)
    steps, evaluations = read_metrics(folder.metrics)
    summary = summary_of(folder, working)
    if summary is None:
        raise PlaitError(f"{folder.path} was deleted while it was read")
    asked = config.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    return _ReadRun(
        folder=folder,
        summary=summary,
        asked=flat_values(config),
        recipe=tomli_w.dumps(asked),
        seed=flat_values(config)["run.seed"],
        plan=plan,
        account=account,
        receipt=read_receipt(folder.receipt) if folder.receipt.exists() else None,
        steps=steps,
        evaluations=evaluations,
        samples=read_samples(folder.samples),
    )


# Over several runs.


def _shared_sections(runs: Sequence[_ReadRun], working: WorkingFolder) -> Iterator[ReportPart]:
    titles = ("run", "state", "tokens", "loss", "tokens/s", "a step", "workers")
    yield ReportPart(title="Side by side", table=ReportTable(titles=titles, rows=[_row_of(run) for run in runs]))
    if len({run.plan.job.corpus_hash for run in runs}) == 1:
        yield ReportPart(title="How they learned", curves=[_curve_of(run) for run in runs], lines=[_CURVE_WORDS])
    else:
        yield ReportPart(
            title="How they learned",
            lines=["They learned from different tokens, so their losses per token cannot be compared: see each run."],
        )
    if rows := _speedup_rows(runs):
        titles = ("workers", "run", "layout", "tokens/s", "speed-up", "efficiency", "forecast of a step", "a step")
        words = f"The same model and batch, against {runs_name(rows)}."
        yield ReportPart(title="Speed by workers", lines=[words], table=ReportTable(titles=titles, rows=rows))
    if len(runs) == 2:
        found = compare_folders(runs[0].folder, runs[1].folder, working)
        yield ReportPart(title="What explains the difference", code="\n".join(comparison_lines(found)))


def runs_name(rows: Sequence[Sequence[str]]) -> str:
    """The run against which speed-ups are measured: the first row's."""
    return f"{rows[0][1]} with {counted(int(rows[0][0]), 'worker')}"


def _row_of(run: _ReadRun) -> Sequence[str]:
    speed = run.summary.tokens_per_s
    step = run.receipt.step_s_median if run.receipt else None
    return (
        run.summary.name,
        run.summary.state,
        format_count(run.summary.tokens),
        loss_text(run.summary) or "none yet",
        format_count(speed) if speed else "none yet",
        format_duration(step) if step and isfinite(step) else "none yet",
        str(run.plan.world_size),
    )


def _speedup_rows(runs: Sequence[_ReadRun]) -> Sequence[Sequence[str]]:
    """A row for each run, the fewest workers first; empty unless the runs compute the same step with different numbers
    of workers."""
    known = [(run, run.summary.tokens_per_s) for run in runs]
    jobs = {str((run.plan.job.shape, run.plan.job.sequence, run.plan.job.batch_sequences)) for run in runs}
    speeds = [(run, speed) for run, speed in known if speed]
    if len(jobs) > 1 or len({run.plan.world_size for run, _ in speeds}) < 2:
        return []
    ordered = sorted(speeds, key=lambda pair: (pair[0].plan.world_size, -pair[1]))
    fewest, base = ordered[0]
    rows = []
    for run, speed in ordered:
        workers, forecast, step = run.plan.world_size, run.plan.forecast, run.receipt and run.receipt.step_s_median
        speedup = speed / base
        rows.append(
            (
                str(workers),
                run.summary.name,
                str(run.plan.placement.layout),
                format_count(speed),
                f"{speedup:.2f}",
                f"{speedup * fewest.plan.world_size / workers:.0%}",
                format_duration(forecast.step_s) if forecast else "none",
                format_duration(step) if step and isfinite(step) else format_duration(run.plan.batch_tokens / speed),
            )
        )
    return rows


# Of one run.

_CURVE_WORDS = (
    "Lines are the training loss in nats per token, each point the mean of a few steps. Dots are the loss on held-out "
    "text."
)


def _sections_of(run: _ReadRun) -> Iterator[ReportPart]:
    yield ReportPart(title="In short", facts=list(_short_facts(run)), facts_as="tiles")
    if (found := run.account.bottleneck) is not None:
        remedies = [remedy.text for remedy in found.remedies]
        yield ReportPart(title="What limits it", lines=[found.sentence], points=remedies)
    if len(run.steps) > 1:
        yield ReportPart(title="How it learned", lines=[_CURVE_WORDS], curves=[_curve_of(run)])
    if run.samples:
        yield _samples_section(run.samples)
    yield ReportPart(title="What was asked", lines=["The keys of the recipe that were set."], code=run.recipe)
    yield _plan_section(run.plan)
    if run.receipt is not None:
        yield _forecast_section(run.receipt)
        yield ReportPart(title="The receipt", facts=[row for row in receipt_rows(run.receipt) if row[1]])
    yield _time_section(run.account)
    yield _incident_section(run.account)
    yield _repeat_section(run)


def _short_facts(run: _ReadRun) -> Iterator[tuple[str, str]]:
    summary = run.summary
    yield "state", f"{summary.state}, step {summary.step:,} of {run.plan.job.steps:,}"
    yield "loss", loss_text(summary) or "none yet"
    yield "trained on", f"{format_count(summary.tokens)} tokens"
    yield "time", format_duration(run.account.wall_s)
    yield "speed", f"{format_count(summary.tokens_per_s)} tokens/s" if summary.tokens_per_s else "none yet"
    yield "model", f"{format_count(summary.parameters or 0)} parameters"


def _samples_section(samples: Sequence[SampleReport]) -> ReportPart:
    """The first sample and the last one."""
    shown = dict.fromkeys([samples[0], samples[-1]])
    texts = [
        f"{'Before training' if one.step == 0 else f'After step {one.step:,}'}:\n{one.prompt}{one.text}"
        for one in shown
    ]
    line = f"Each sample continues the same words: {samples[0].prompt!r}."
    return ReportPart(title="What it writes", lines=[line], code="\n\n".join(texts))


def _plan_section(plan: Plan) -> ReportPart:
    job, optimizer = plan.job, plan.job.optimizer
    facts = [
        ("layout", f"{plan.placement.layout}, {counted(plan.world_size, 'worker')}"),
        ("machines", f"{plan.devices} × {plan.machines.fingerprint.get('name', plan.machines.device)}"),
        (
            "model",
            f"{counted(job.shape.layers, 'layer')} of width {job.shape.width}, vocabulary {job.shape.vocabulary:,}",
        ),
        ("steps", f"{job.steps:,} of {format_count(plan.batch_tokens)} tokens (budget: {job.budget})"),
        ("optimizer", f"{optimizer.kind}, learning rate {optimizer.lr:.3g}, {optimizer.schedule}"),
        ("numbers", plan.arithmetic.precision),
    ]
    warnings = [f"warning: {warning}" for warning in plan.warnings]
    return ReportPart(title="What was planned, and why", facts=facts, points=[*warnings, *plan.reasons])


def _forecast_section(receipt: Receipt) -> ReportPart:
    pairs = (
        ("a step", receipt.predicted_step_s, receipt.step_s_median, format_duration),
        (
            "tensors of a device",
            receipt.predicted_peak_bytes_per_device,
            _largest(receipt.peak_tensor_bytes),
            format_bytes,
        ),
        ("size of a worker", receipt.predicted_rss_bytes, _largest(receipt.peak_rss_bytes), format_bytes),
    )
    rows = [
        (name, form(predicted), form(measured), f"{measured / predicted - 1:+.0%}")
        for name, predicted, measured, form in pairs
        if predicted and measured and isfinite(measured)
    ]
    predicted, measured = receipt.predicted_items, receipt.measured_items
    bars = []
    if predicted and measured:
        items = [(words, predicted[key], measured[key]) for key, words in ITEM_NAMES.items()]
        bars = [item for item in items if max(item[1:]) >= WORTH_NAMING * sum(measured.values())]
    table = ReportTable(titles=("", "forecast", "measured", "more or less"), rows=rows) if rows else None
    return ReportPart(
        title="Forecast and fact", lines=[] if rows else ["The plan had no forecast."], table=table, bars=bars
    )


def _largest(values: Sequence[int]) -> float | None:
    return float(max(values)) if values else None


def _time_section(account: RunAccount) -> ReportPart:
    whole_s = account.wall_s
    shares = [
        (name, spent) for name, spent in account.seconds.items() if whole_s > 0 and spent > _LEAST_SHARE * whole_s
    ]
    rows = [(TIME_IN_WORDS[name], format_duration(spent), f"{spent / whole_s:.1%}") for name, spent in shares]
    table = ReportTable(titles=("what", "time", "share"), rows=rows) if rows else None
    line = f"{format_duration(account.wall_s)} in {counted(account.starts, 'start')}."
    return ReportPart(title="Where the time went", lines=[line], table=table)


def _incident_section(account: RunAccount) -> ReportPart:
    times = [one.at.partition(".")[0].removesuffix("+00:00").replace("T", " ") for one in account.incidents]
    points = [
        f"{at} UTC, after step {one.step}: {one.sentence} ({one.decision})"
        for at, one in zip(times, account.incidents, strict=True)
    ]
    return ReportPart(title="Incidents", lines=[] if points else ["None."], points=points)


def _repeat_section(run: _ReadRun) -> ReportPart:
    job, name = run.plan.job, run.summary.name
    lines = [
        f"Save the recipe above as {name}.toml beside its text, and run the command below with the same versions. It "
        "names what plait chose, and may choose differently on another machine.",
        f"The seed is {run.seed}. The text is the same if plan.json has the same corpus_hash, {job.corpus_hash[:16]}….",
    ]
    facts = [(package, str(version)) for package, version in versions_of(run.plan).items()]
    code = shlex.join(["plait", "train", f"{name}.toml", *settings_to_repeat(run.asked, run.plan)])
    return ReportPart(title="How to repeat it", lines=lines, facts=facts, code=code)


def _curve_of(run: _ReadRun) -> LossCurve:
    """Of many steps, means of as many equal parts as a curve has points."""
    finite = [step for step in run.steps if isfinite(step.loss)]
    parts = min(CURVE_POINTS, len(finite))
    edges = [part * len(finite) // parts for part in range(parts + 1)] if parts else [0]
    chunks = [finite[first:last] for first, last in pairwise(edges)]
    tokens = {step.step: step.tokens for step in run.steps}
    return LossCurve(
        name=run.summary.name,
        steps=[(chunk[-1].tokens, fmean(step.loss for step in chunk)) for chunk in chunks],
        held_out=[(tokens[e.step], e.eval_loss) for e in run.evaluations if e.step in tokens and isfinite(e.eval_loss)],
    )
