"""`plait plan` with a pool: choose the machines, then plan for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from plait.commands.planning.plan_report import REPORT_COLUMNS, PlannedRun, make_plan_report
from plait.commands.preparing.usual_corpus import corpus_facts_or_usual
from plait.errors import PlaitError
from plait.machines.catalog import device_names, find_device
from plait.machines.pool import Pool, pool_of_short_form, read_pool
from plait.planner.derive.intervals import checkpoint_every
from plait.planner.pools.affordable import affordable_model, asks_for_model
from plait.planner.pools.answer import PoolAnswer, aims_of, answer_of, pool_job
from plait.planner.pools.availability import (
    Availability,
    SimulatedChoice,
    generated_availability,
    read_availability,
    simulate_spot_run,
)
from plait.planner.pools.choice import best_choice
from plait.planner.pools.choice_words import cost_text
from plait.planner.pools.picture import picture_of_choices
from plait.planner.pools.pricing import PoolPricer, resources_of_selection
from plait.planner.pools.rendered import answer_lines, answer_values, simulated_text
from plait.planner.report.page import figure_html
from plait.planner.report.report import PlanReport
from plait.planner.report.report_json import report_values
from plait.planner.report.text import aligned_table
from plait.recipe.schema import RunConfig
from plait.regular_file import SMALL_FILE_BYTES, read_regular_file
from plait.screen.screen import wrapped
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

LEAST_SHARE_NAMED = 0.005
"""Parts of a run's cost below this share are not mentioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """The answer for a pool, and the plan for the machines that it recommends."""

    answer: PoolAnswer
    plan: PlanReport
    affordable: str = ""
    """A sentence on the model that the recipe's money pays for; empty if the recipe names one."""
    over_time: SimulatedChoice | None = None
    """The simulated run on spot machines that come and go, if requested."""


def asked_pool(pool_file: Path | None, short_form: str | None) -> Pool | None:
    """The pool that the user gives as a file or in short form; None if neither is given."""
    if pool_file and short_form:
        raise PlaitError("--pool and --from both name a pool; remove one of them")
    if pool_file:
        return read_pool(pool_file)
    return pool_of_short_form(short_form) if short_form else None


def named_pool(named: str | Path) -> Pool:
    """The pool that a Python program gives: a file (as text, it must end in .toml), or the short form."""
    if isinstance(named, Path) or named.endswith(".toml"):
        return read_pool(Path(named))
    return pool_of_short_form(named)


def planned_pool_run(report: PoolReport) -> PlannedRun:
    """The report in the form for Python."""
    return PlannedRun(
        values=pool_report_values(report),
        report=report.plan,
        machines=answer_text(report),
        machines_html=pool_page_html(report),
    )


def pool_report(
    config: RunConfig,
    pool: Pool,
    *,
    top: int,
    availability: str | None = None,
    working: WorkingFolder = CURRENT_FOLDER,
) -> PoolReport:
    """Choose machines from a pool and plan for them; raises PlaitError in one sentence.

    With `availability`, a file or "seed:NUMBER", the run is also simulated on spot machines that come and go.
    """
    there = _asked_availability(availability, pool) if availability else None  # a bad file ends this at once
    corpus, assumed = corpus_facts_or_usual(config, working)
    aims, affordable = aims_of(config, pool), ""
    if asks_for_model(config, corpus):
        aims = aims if config.plan.objective != "auto" else replace(aims, objective="balanced")
        model = affordable_model(config, corpus, pool, aims)
        config, affordable = model.config, model.sentence(aims, pool)
    job = pool_job(config, corpus, pool)
    pricer = PoolPricer(job.config, corpus, job.sized, pool, job.steps)
    answer = answer_of(job, pricer, pool, aims)
    over_time = _over_time(job.config, pool, answer, pricer, there) if there else None
    best = answer.best
    report = make_plan_report(job.config, resources_of_selection(best.selection.cluster), top=top, working=working)
    cost = best.cost if pool.currency == "USD" else None
    report = replace(
        report,
        run=replace(report.run, cost_usd=cost),
        money=_money_text(answer),
        notes=tuple(dict.fromkeys((*pool.notes, *assumed, *report.notes))),
    )
    return PoolReport(answer=answer, plan=report, affordable=affordable, over_time=over_time)


def _over_time(
    config: RunConfig, pool: Pool, answer: PoolAnswer, pricer: PoolPricer, there: Availability
) -> SimulatedChoice:
    """Simulate the run on spot machines that come and go, and compare it with the best on-demand choice."""
    run = simulate_spot_run(
        pool, answer.explored, pricer.price, pricer.price_bound, there, answer.aims, _checkpoint_s(config)
    )
    steady = [one for one in answer.explored if one.purchase == "on demand" and one.cost is not None]
    beside = best_choice(steady, answer.aims) if steady else None
    return SimulatedChoice(run=run, beside=beside, availability=there, currency=pool.currency)


def _asked_availability(text: str, pool: Pool) -> Availability:
    """The file or generated day that --availability names; raises PlaitError if the pool has no spot machines."""
    if all(entry.spot_price is None for entry in pool.devices):
        raise PlaitError("--availability is for spot machines; add spot_price to a [[device]] of the pool")
    if text.startswith("seed:"):
        if not text[5:].isdecimal() or len(text) > 20:
            raise PlaitError(f'--availability {text} has no seed; write for example "seed:1"')
        return generated_availability(int(text[5:]), pool)
    try:
        rows = read_regular_file(Path(text), SMALL_FILE_BYTES).decode("utf-8")
    except OSError as error:
        raise PlaitError(
            f'cannot read the availability {text}: {error.strerror}; name a file, or write "seed:1" for a generated one'
        ) from error
    except UnicodeDecodeError:
        raise PlaitError(f"{text} is not text; --availability takes a CSV file in UTF-8") from None
    return read_availability(rows, text, pool)


def _checkpoint_s(config: RunConfig) -> float:
    """Seconds between two checkpoints; an interval in steps counts as one minute."""
    every = checkpoint_every(config).value
    return every.value if every.unit == "seconds" and every.value else 60.0


def _money_text(answer: PoolAnswer) -> str:
    """The cost of the recommended choice, and its main parts."""
    best = answer.best
    if best.money is None:
        lacking = dict.fromkeys(entry.device.name for entry, _ in best.selection.taken if entry.price is None)
        return f"unknown, because neither the pool nor the catalogue has a price for {' and '.join(lacking)}"
    shares = {
        "traffic between zones": best.money.egress / best.money.total if best.money.egress else 0.0,
        "interruptions of spot machines": best.money.restarts / best.money.total if best.money.restarts else 0.0,
    }
    parts = [f"{share:.0%} of it for {what}" for what, share in shares.items() if share >= LEAST_SHARE_NAMED]
    return "; ".join([f"{cost_text(best)} at the pool's prices", *parts])


def pool_report_text(report: PoolReport, plan_text: str, columns: int = REPORT_COLUMNS) -> str:
    """The answer as printed, followed by the text of the plan."""
    return answer_text(report, columns) + plan_text


def answer_text(report: PoolReport, columns: int = REPORT_COLUMNS) -> str:
    """Which machines to take, the other choices, and what was assumed."""
    first = [f"model    {report.affordable}"] if report.affordable else []
    over_time = [f"spot     {simulated_text(report.over_time)}", ""] if report.over_time else []
    said = [*first, *answer_lines(report.answer, columns), *over_time]
    lines = [line if "\n" in line else wrapped(line, columns) for line in said]
    return "\n".join(lines) + "\n"


def pool_report_values(report: PoolReport) -> dict[str, Any]:
    """All keys of `plait plan --json` for a pool."""
    values = report_values(report.plan) | answer_values(report.answer)
    if report.affordable:
        values["affordable_model"] = report.affordable
    if report.over_time:
        values["over_time"] = asdict(report.over_time.run) | {"pays": report.over_time.pays}
    return values


def pool_page_html(report: PoolReport) -> str:
    """The recommendation and the picture of time against cost, for the plan's page."""
    answer = report.answer
    lines = [report.affordable, *([simulated_text(report.over_time)] if report.over_time else [])]
    said = "".join(f'<p class="soft">{escape(line)}.</p>' for line in (*lines, *answer.left_out, *answer.notes) if line)
    return (
        f'<section>\n<h2 class="first">Which machines of {escape(answer.pool.name)}</h2>\n'
        f'<p class="answer">{escape(answer.sentence)}</p>\n{said}{figure_html(picture_of_choices(answer))}\n</section>'
    )


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
