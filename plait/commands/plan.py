"""`plait plan`: what a recipe would take on machines that need not be there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from plait.commands.planning.make_plan import PLANNING, kept_plan
from plait.commands.planning.output_files import check_output_file, write_output_file
from plait.commands.planning.plan_report import (
    REPORT_COLUMNS,
    make_plan_report,
    plan_report_text,
    plan_summary_text,
    training_section,
)
from plait.commands.planning.pool_plan import (
    PoolReport,
    asked_pool,
    pool_page_html,
    pool_report,
    pool_report_text,
    pool_report_values,
    prices_text,
)
from plait.commands.preparing.corpus import find_prepared_corpus
from plait.errors import PlaitError
from plait.machines.cluster import Cluster, read_cluster
from plait.planner.explain.glossary import glossary_text
from plait.planner.report.diagnosis import seconds_of
from plait.planner.report.page import page_html
from plait.planner.report.report import PlanReport, with_measured_step
from plait.planner.report.report_json import report_values
from plait.planner.report.text import comparison_table
from plait.planner.resolve.named import named_workers
from plait.planner.search.complexity import complexity_table
from plait.probing.survey import resources_of, resources_on_paper, survey_machine
from plait.recipe.load import load_recipe
from plait.recipe.schema import MachineChoiceSection, RunConfig
from plait.screen.screen import Screen, ShowProgress, ignore_progress
from plait.workers import worker_pool
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

OTHERS_LISTED = 10
"""Default number of other layouts in a report."""
WHY_HINT = "--why gives the reasons, the other layouts, and what would change the choice"


def plan(
    recipe: Path,
    overrides: Sequence[str],
    *,
    clusters: Sequence[str],
    top: int,
    json_file: Path | None,
    html_file: Path | None = None,
    measured: str | None = None,
    pool_file: Path | None = None,
    pool_text: str | None = None,
    availability: str | None = None,
    detail: Literal["summary", "reasons"] = "summary",
    screen: Screen,
) -> None:
    """Print the plan for each cluster, for the best machines of a pool, or for this machine where nothing is named;
    raises PlaitError in one sentence."""
    if measured is not None and len(clusters) > 1:
        raise PlaitError("--measured describes a run on one cluster; give a single --cluster with it")
    check_output_file(json_file)
    check_output_file(html_file)
    measured_s = None if measured is None else seconds_of(measured)
    pool = asked_pool(pool_file, pool_text)
    if pool and (clusters or measured):
        raise PlaitError("--pool and --from choose machines; leave --cluster and --measured out")
    if availability and not pool:
        raise PlaitError("--availability is about the machines of a pool; name one with --pool or --from")
    config = load_recipe(recipe, overrides)
    if pool:
        with screen.progress() as show:
            show(0, 0, f"{PLANNING} for {pool.name}")
            chosen = pool_report(config, pool, top=top, availability=availability)
        _show_pool(chosen, json_file, html_file, detail, screen)
        return
    machines = [read_cluster(text) for text in clusters] or [None]
    with screen.progress() as show:
        reports = [plan_report(config, cluster, top=top, show=show) for cluster in machines]
    if measured_s:
        reports = [with_measured_step(reports[0], measured_s)]
    columns = screen.columns or REPORT_COLUMNS
    text_of = plan_summary_text if detail == "summary" else plan_report_text
    for report in reports:
        screen.print(text_of(report, columns))
    if len(reports) > 1:
        screen.print(f"{comparison_table(reports, columns)}\n")
    usual = MachineChoiceSection()
    if idle := [key for key in MachineChoiceSection.model_fields if getattr(config.plan, key) != getattr(usual, key)]:
        keys = " and ".join(f"plan.{key}" for key in idle)
        screen.print(f"{keys} changed nothing here: name machines to choose from with --pool or --from")
    if detail == "summary":
        screen.print(WHY_HINT)
    if json_file:
        values = [report_values(report) for report in reports]
        write_output_file(json_file, json.dumps(values[0] if len(values) == 1 else values, indent=2) + "\n")
    if html_file:
        write_output_file(html_file, page_html(reports))


def _show_pool(
    report: PoolReport,
    json_file: Path | None,
    html_file: Path | None,
    detail: Literal["summary", "reasons"],
    screen: Screen,
) -> None:
    columns = screen.columns or REPORT_COLUMNS
    text_of = plan_summary_text if detail == "summary" else plan_report_text
    screen.print(pool_report_text(report, text_of(report.plan, columns), columns))
    if detail == "summary":
        screen.print(WHY_HINT)
    if json_file:
        write_output_file(json_file, json.dumps(pool_report_values(report), indent=2) + "\n")
    if html_file:
        write_output_file(html_file, page_html([report.plan], pool_page_html(report)))


def prices() -> str:
    """The catalogue's prices, for a person who compares them with their own."""
    return prices_text()


def terms() -> str:
    """The planner's words and its table of complexity, for someone new."""
    return f"{glossary_text()}\nPoints of complexity, added up:\n{complexity_table()}"


def plan_report(
    config: RunConfig,
    cluster: Cluster | None = None,
    *,
    top: int = OTHERS_LISTED,
    working: WorkingFolder = CURRENT_FOLDER,
    show: ShowProgress = ignore_progress,
) -> PlanReport:
    """The plan for a cluster, or for this machine, with `top` other layouts; raises PlaitError in one sentence."""
    if cluster is None:
        return _report_for_this_machine(config, top, working, show)
    show(0, 0, f"{PLANNING} for {cluster.name}")
    return make_plan_report(config, resources_on_paper(cluster, working), top=top, working=working)


def _report_for_this_machine(config: RunConfig, top: int, working: WorkingFolder, show: ShowProgress) -> PlanReport:
    """The report, and before it what `plait train` will do here: there a kept plan counts for more than a forecast."""
    with worker_pool(working) as workers:
        show(0, 0, "looking at the machine")
        survey = survey_machine(workers, named_workers(config))
        corpus = find_prepared_corpus(config, working)  # a text that is not here is said: plait train would say so
        show(0, 0, PLANNING)
        report = make_plan_report(config, resources_of(survey, workers), top=top, working=working)
        kept = kept_plan(config, corpus, survey, workers) if corpus else None
    first = training_section(kept, report.layouts, report.plan.placement.layout)
    return replace(report, training=first)
