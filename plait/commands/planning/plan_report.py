"""The answer of `plait plan` for one cluster: the plan, and the report that explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

from plait.commands.preparing.usual_corpus import corpus_facts_or_usual
from plait.errors import PlaitError
from plait.model.shape import parameter_count
from plait.planner.calibration.factors import calibration_text
from plait.planner.derive.resources import Resources
from plait.planner.explain.left_out import devices_text
from plait.planner.explain.report import TEXT_HEADINGS, PlanSection, report_sections
from plait.planner.memory.state_copies import with_copies
from plait.planner.page.page import Chapter
from plait.planner.plan import Plan
from plait.planner.resolve.resolve import draft, lines_without_effect, settle
from plait.planner.resolve.worker_layouts import WorkerLayout, choose
from plait.planner.search.found import Search
from plait.recipe.schema import RunConfig
from plait.screen.screen import wrapped
from plait.units import counted, format_count, format_duration
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

REPORT_COLUMNS = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The plan for one cluster."""

    plan: Plan
    search: Search
    notes: tuple[str, ...]
    """Sentences about values that were derived or assumed."""
    sections: tuple[PlanSection, ...]
    layouts: tuple[WorkerLayout, ...]
    """The layouts that a run would time on the machine itself, before it chooses one of them."""


def make_plan_report(
    config: RunConfig, resources: Resources, *, top: int, working: WorkingFolder = CURRENT_FOLDER
) -> PlanReport:
    """Plan a recipe for machines that need not be there; usual values replace text that was not prepared."""
    corpus, assumed = corpus_facts_or_usual(config, working)
    read_as = resources.cluster.notes if resources.cluster else ()
    drafted = draft(config, corpus, resources, recipe_hash="")
    chosen, notes = choose(drafted.layouts), [*read_as, *assumed, *drafted.request.notes]
    notes += lines_without_effect(config, [chosen])
    found, forecast = chosen.search, chosen.forecast
    if found is None or forecast is None:
        raise PlaitError(
            f"{resources.machine.name} is not in plait's catalogue; describe it in a cluster.json and pass --cluster"
        )
    if observation := calibration_text(forecast.calibration, forecast.items, forecast.basis):
        notes.append(observation)
    plan = settle(config, drafted, [chosen])
    if copies := with_copies(config.recover, plan, found.cluster.n_nodes)[1]:
        notes.append(copies)
    sections = report_sections(found, plan.job.budget, top=top)
    return PlanReport(plan=plan, search=found, notes=tuple(notes), sections=sections, layouts=drafted.layouts)


def plan_report_text(report: PlanReport, columns: int = REPORT_COLUMNS) -> str:
    """The whole answer for people, in lines of this many columns at most."""
    w = report.search.workload
    lines = [
        f"plan     {format_count(parameter_count(report.plan.job.shape))} parameters on "
        f"{_machines_text(report.search)}",
        f"batch    {counted(w.batch_sequences, 'sequence', ',')} of {w.sequence:,} tokens a step, {w.precision}",
        *(f"         · {note}" for note in report.notes),
    ]
    for section in report.sections:
        heading = TEXT_HEADINGS.get(section.title, section.title)
        lines += [f"{heading if first == 0 else '':8} {line}" for first, line in enumerate(section.lines)]
    return "\n".join(wrapped(line, columns) for line in lines) + "\n"


def comparison_table(reports: Sequence[PlanReport], columns: int = REPORT_COLUMNS) -> str:
    """Several clusters in a table of this many columns of text at most; a long layout goes on in the lines below it."""
    rows = [("cluster", "step", "tokens/s", "layout")]
    for one in reports:
        step_s = float(one.search.step_s[one.search.chosen])
        tokens = format_count(one.search.workload.batch_tokens / step_s)
        rows.append((one.search.cluster.name, format_duration(step_s), tokens, one.sections[0].lines[0]))
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    start = min(sum(wide) + 2 * len(wide), columns // 2)
    return "\n".join(
        fill(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, wide, strict=False)), row[3]]),
            columns,
            subsequent_indent=" " * start,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for row in rows
    )


def _machines_text(found: Search) -> str:
    """The machines by name and in full, and which of them are used where some are left out."""
    if found.left_out is None:
        return f"{found.cluster.name}: {found.cluster.hardware}"
    return f"{devices_text(found.cluster)} of {found.cluster.name}: {found.left_out.cluster.hardware}"


def chapter_of(report: PlanReport) -> Chapter:
    """The answer as a chapter of the page with pictures."""
    return Chapter(
        found=report.search,
        parameters=parameter_count(report.plan.job.shape),
        machines=_machines_text(report.search),
        notes=report.notes,
        sections=report.sections,
    )
