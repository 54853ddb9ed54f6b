"""The answer of `plait plan` for machines that need not be there, as text, and as `plait.plan` gives it to Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from plait.commands.planning.output_files import check_output_file, write_output_file
from plait.commands.preparing.usual_corpus import corpus_facts_or_usual
from plait.errors import PlaitError
from plait.layout import Layout, layout_summary
from plait.planner.calibration.factors import calibration_text
from plait.planner.derive.hyperparameters import muon_reason
from plait.planner.derive.resources import Resources
from plait.planner.explain.muon_update import muon_lines
from plait.planner.memory.state_copies import with_copies
from plait.planner.plan import Placement, Plan
from plait.planner.report.page import page_html
from plait.planner.report.report import (
    PlanReport,
    PlanSection,
    plan_report_of,
    range_text,
    run_cost_text,
    run_time_text,
)
from plait.planner.report.report_json import report_values
from plait.planner.report.text import report_lines, summary_lines
from plait.planner.resolve.resolve import draft, lines_without_effect, settled_on
from plait.planner.resolve.worker_layouts import WorkerLayout, choose
from plait.recipe.schema import RunConfig
from plait.screen.screen import wrapped
from plait.units import counted, format_bytes, format_duration
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
    plan = settled_on(config, drafted, chosen)
    warnings = (f"warning: {warning}" for warning in plan.warnings)
    notes = list(dict.fromkeys((*read_as, *assumed, *warnings, *lines_without_effect(config, [chosen]))))
    reasons = [*drafted.request.notes]
    if plan.job.optimizer.kind == "muon":
        reasons += [muon_reason(config.optimizer), *muon_lines(found)]
    learned = calibration_text(forecast.calibration, forecast.items, forecast.basis)
    copies = with_copies(config.recover, plan, found.cluster.n_nodes)[1]
    reasons += [line for line in (learned, copies) if line]
    return plan_report_of(plan, found, layouts=drafted.layouts, notes=notes, reasons=reasons, top=top)


def plan_report_text(report: PlanReport, columns: int = REPORT_COLUMNS) -> str:
    """The whole answer for people with all reasons, in lines of this many columns at most."""
    return "\n".join(wrapped(line, columns) for line in report_lines(report)) + "\n"


def plan_summary_text(report: PlanReport, columns: int = REPORT_COLUMNS) -> str:
    """The answer for people without its reasons, in lines of this many columns at most."""
    return "\n".join(wrapped(line, columns) for line in summary_lines(report)) + "\n"


def training_section(kept: Plan | None, layouts: Sequence[WorkerLayout], forecast: Layout) -> PlanSection:
    """The layout that a new run takes: that of the `kept` plan, the only one of `layouts`, or the one of them that
    timing will choose. `forecast` is the layout that the rest of the report is about."""
    if kept is not None:
        lines = [f"a new run takes {_text(kept.placement)}, {_source(kept)}; --replan plans again"]
    elif len(layouts) == 1:
        lines = [f"a new run takes {_text(layouts[0].placement)}"]
    else:
        named = "; ".join(_text(one.placement) for one in layouts)
        lines = [f"a new run times {len(layouts)} layouts on this machine, then chooses: {named}"]
    if len(layouts) > 1 or (kept is not None and kept.placement.layout != forecast):
        lines.append("the rest of this report is the forecast; no step was timed for it")
    return PlanSection(title="train", lines=tuple(lines))


def _source(kept: Plan) -> str:
    if kept.step_s is None:
        return "as planned before"
    return f"{format_duration(kept.step_s)} a step, as timed here when it was planned"


def _text(placement: Placement) -> str:
    workers, threads = counted(placement.layout.world_size, "worker"), counted(placement.threads, "thread")
    return f"{layout_summary(placement.layout)} ({workers} × {threads})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlannedRun:
    """A plan for one cluster, or for the best machines of a pool, shown in a terminal or a notebook. Two are equal
    where all their values are."""

    values: Mapping[str, Any]
    """All keys of `plait plan --json`."""
    report: PlanReport = field(compare=False)
    machines: str = field(default="", compare=False)
    """The machines of a pool to take and why, as text and as part of a page; empty without a pool."""
    machines_html: str = field(default="", compare=False)

    @property
    def choices(self) -> Sequence[Mapping[str, Any]]:
        """The choices of a pool that are worth considering, the fastest first; none without a pool."""
        return self.values.get("choices", ())

    @property
    def recommended(self) -> Mapping[str, Any] | None:
        """The recommended one of `choices`; None without a pool."""
        return self.choices[self.values["recommended"]] if self.choices else None

    @property
    def layout(self) -> Mapping[str, int]:
        """Degree of each axis: {"pipeline": 1, "replicate": 8, …}."""
        return self.values["layout"]

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.values["step_s"]

    @property
    def bytes_per_device(self) -> float:
        """Predicted memory on the fullest device."""
        return self.values["bytes_per_device"]

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization as a fraction; None where the peak is unknown."""
        return self.values["mfu"]

    @property
    def why(self) -> Sequence[str]:
        """Sentences: why this layout, what limits it, what would change the choice, how sure the forecast is."""
        return self.values["why"]

    def __str__(self) -> str:
        return self.machines + plan_summary_text(self.report)

    def __repr__(self) -> str:
        return str(self).rstrip("\n")

    def _repr_html_(self) -> str:
        """The report as a notebook shows it: the main figures, the reasons, and the whole report to unfold."""
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self._facts())
        reasons = "".join(f"<li>{escape(line)}</li>" for line in self.why)
        whole = (
            f"<details><summary>the whole plan</summary><pre>{escape(plan_report_text(self.report))}</pre></details>"
        )
        machines = f"<pre>{escape(self.machines)}</pre>" if self.machines else ""
        return f"{machines}<table>{rows}</table><ul>{reasons}</ul>{whole}"

    def to_html(self, file: str | Path) -> Path:
        """Write a page with figures and return its path; raises PlaitError where it cannot be written."""
        path = Path(file)
        check_output_file(path)
        write_output_file(path, page_html([self.report], self.machines_html))
        return path

    def _facts(self) -> Sequence[tuple[str, str]]:
        mfu = "unknown" if self.mfu is None else f"{self.mfu:.0%}"
        return (
            ("machines", self.values["cluster"]),
            ("layout", self.report.layout),
            ("a step", f"{format_duration(self.step_s)}, probably {range_text(self.report.search)}"),
            ("the whole run", run_time_text(self.report.run)),
            ("memory", f"{format_bytes(self.bytes_per_device)} a device"),
            ("money", run_cost_text(self.report.run)),
            ("MFU", mfu),
        )


def planned_run(report: PlanReport) -> PlannedRun:
    """The report as Python is given it."""
    return PlannedRun(values=report_values(report), report=report)
