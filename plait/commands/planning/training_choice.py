"""What `plait train` will do with a recipe on this machine, as `plait plan` says it."""

from __future__ import annotations

from collections.abc import Sequence

from plait.layout import Layout, layout_summary
from plait.planner.plan import Placement, Plan
from plait.planner.report.report import PlanSection
from plait.planner.resolve.worker_layouts import WorkerLayout
from plait.units import counted, format_duration


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
