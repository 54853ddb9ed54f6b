"""What `plait plan` answers for machines that need not be there, and its text."""

from __future__ import annotations

from plait.commands.preparing.usual_corpus import corpus_facts_or_usual
from plait.errors import PlaitError
from plait.planner.calibration.factors import calibration_text
from plait.planner.derive.resources import Resources
from plait.planner.memory.state_copies import with_copies
from plait.planner.report.report import PlanReport, plan_report_of
from plait.planner.report.text import report_lines
from plait.planner.resolve.resolve import draft, lines_without_effect, settle
from plait.planner.resolve.worker_layouts import choose
from plait.recipe.schema import RunConfig
from plait.screen.screen import wrapped
from plait.working_folder import CURRENT_FOLDER, WorkingFolder

REPORT_COLUMNS = 110


def make_plan_report(
    config: RunConfig, resources: Resources, *, top: int, working: WorkingFolder = CURRENT_FOLDER
) -> PlanReport:
    """Plan a recipe for machines that need not be there; usual values replace text that was not prepared."""
    corpus, assumed = corpus_facts_or_usual(config, working)
    read_as = resources.cluster.notes if resources.cluster else ()
    drafted = draft(config, corpus, resources, recipe_hash="")
    chosen = choose(drafted.layouts)
    found, forecast = chosen.search, chosen.forecast
    if found is None or forecast is None:
        raise PlaitError(
            f"{resources.machine.name} is not in plait's catalogue; describe it in a cluster.json and pass --cluster"
        )
    plan = settle(config, drafted, [chosen])
    notes = [*read_as, *assumed, *drafted.request.notes, *lines_without_effect(config, [chosen])]
    learnt = calibration_text(forecast.calibration, forecast.items, forecast.basis)
    copies = with_copies(config.recover, plan, found.cluster.n_nodes)[1]
    notes += [line for line in (learnt, copies) if line]
    return plan_report_of(plan, found, layouts=drafted.layouts, notes=notes, top=top)


def plan_report_text(report: PlanReport, columns: int = REPORT_COLUMNS) -> str:
    """The whole answer for people, in lines of this many columns at most."""
    return "\n".join(wrapped(line, columns) for line in report_lines(report)) + "\n"
