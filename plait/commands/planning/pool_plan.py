"""`plait plan` with a pool: which of its machines, and the plan for these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.commands.planning.plan_report import REPORT_COLUMNS, make_plan_report
from plait.commands.preparing.usual_corpus import corpus_facts_or_usual
from plait.errors import PlaitError
from plait.machines.catalog import device_names, find_device
from plait.machines.pool import Pool, pool_of_short_form, read_pool
from plait.planner.pools.answer import PoolAnswer, aims_of, answer_of, pool_job
from plait.planner.pools.choice_words import cost_text
from plait.planner.pools.pricing import resources_of_selection
from plait.planner.pools.rendered import answer_lines, answer_values
from plait.planner.report.report import PlanReport
from plait.planner.report.report_json import report_values
from plait.planner.report.text import aligned_table
from plait.recipe.schema import RunConfig
from plait.screen.screen import wrapped
from plait.working_folder import CURRENT_FOLDER, WorkingFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """The answer for a pool, and the plan for the machines that it recommends."""

    answer: PoolAnswer
    plan: PlanReport


def asked_pool(pool_file: Path | None, short_form: str | None) -> Pool | None:
    """The pool that a person names by a file or in a few characters; None where neither is named."""
    if pool_file and short_form:
        raise PlaitError("--pool and --from both name a pool; leave one of them out")
    if pool_file:
        return read_pool(pool_file)
    return pool_of_short_form(short_form) if short_form else None


def pool_report(config: RunConfig, pool: Pool, *, top: int, working: WorkingFolder = CURRENT_FOLDER) -> PoolReport:
    """Choose machines from a pool and plan for them; raises PlaitError in one sentence."""
    corpus, assumed = corpus_facts_or_usual(config, working)
    aims = aims_of(config, pool)
    job = pool_job(config, corpus, pool)
    answer = answer_of(job, corpus, pool, aims)
    best = answer.best
    report = make_plan_report(job.config, resources_of_selection(best.selection.cluster), top=top, working=working)
    cost = best.cost if pool.currency == "USD" else None
    report = replace(
        report,
        run=replace(report.run, cost_usd=cost),
        money=_money_text(answer),
        notes=tuple(dict.fromkeys((*pool.notes, *assumed, *report.notes))),
    )
    return PoolReport(answer=answer, plan=report)


def _money_text(answer: PoolAnswer) -> str:
    """What the recommended choice costs, and for what."""
    best = answer.best
    if best.money is None:
        lacking = dict.fromkeys(entry.device.name for entry, _ in best.selection.taken if entry.price is None)
        return f"unknown, because neither the pool nor the catalogue has a price of {' and '.join(lacking)}"
    parts = [f"{best.money.egress / best.money.total:.0%} of it for traffic between zones"] if best.money.egress else []
    if best.money.restarts:
        parts.append(f"{best.money.restarts / best.money.total:.0%} for interruptions of spot machines")
    return "; ".join([f"{cost_text(best)} at the pool's prices", *parts])


def pool_report_text(report: PoolReport, plan_text: str, columns: int = REPORT_COLUMNS) -> str:
    """The answer for people, and below it the text of the plan."""
    lines = [line if "\n" in line else wrapped(line, columns) for line in answer_lines(report.answer, columns)]
    return "\n".join(lines) + "\n" + plan_text


def pool_report_values(report: PoolReport) -> dict[str, Any]:
    """All keys of `plait plan --json` for a pool."""
    return report_values(report.plan) | answer_values(report.answer)


def prices_text(columns: int = REPORT_COLUMNS) -> str:
    """The catalogue's prices, each with its date and source."""
    devices = [find_device(name) for name in device_names()]
    rows: list[Sequence[str]] = [("device", "$ an hour", "source")]
    rows += [
        (device.name, f"{device.price_per_hour:.2f}", device.price_source)
        for device in devices
        if device.price_per_hour is not None
    ]
    return aligned_table(rows, columns)
