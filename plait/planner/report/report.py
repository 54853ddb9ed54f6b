"""The answer of `plait plan` for one cluster, made once: text, JSON and the page with pictures render it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Literal

from plait.model.shape import parameter_count
from plait.planner.derive.intervals import steps_in_budget
from plait.planner.explain.changes import layout_changes
from plait.planner.explain.choice import (
    LEAST_SHARE_MENTIONED,
    chosen_because,
    devices_text,
    left_out_text,
    limits,
    objections,
)
from plait.planner.explain.compared_layouts import recipe_layout_changes, runners_up, runners_up_lines, why_not
from plait.planner.explain.experts import mixture_lines
from plait.planner.explain.unequal_devices import memory_limit_lines, unequal_lines
from plait.planner.plan import Plan, TrainingJob
from plait.planner.report.diagnosis import Diagnosis, diagnose, explanation_lines, verdict_text
from plait.planner.resolve.worker_layouts import WorkerLayout
from plait.planner.search.cost_breakdown import (
    MEMORY_NAMES,
    TIME_NAMES,
    memory_items,
    model_flops_utilisation,
    time_items,
)
from plait.planner.search.found import Search
from plait.planner.search.layout_kinds import CandidateRow, layout_sentences, layout_text
from plait.planner.search.model_error import RangeKind, expected_range
from plait.planner.step_time.device_rates import USUAL_ACHIEVABLE_SHARE
from plait.planner.step_time.device_time import was_measured
from plait.report.plausibility import mfu_text
from plait.units import counted, format_bytes, format_count, format_days, format_duration, format_si

JOULES_PER_WH = 3600
RANGE_TEXTS: Mapping[RangeKind, str] = {
    "one card": "kinds of plait's own steps on one card",
    "dense-gpu": "published runs of dense models on GPUs",
    "moe": "published runs of models with experts on GPUs",
    "tpu": "published runs of models on TPUs",
}
NO_RUNS = "no run on processors is published; elsewhere, where the model did worst, nine of ten"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFigures:
    """One layout of a search and what it costs by the forecast."""

    row: CandidateRow
    micro_sequences: int
    micro_limits: tuple[int, ...]
    """Sequences at a time of each data-parallel rank, where they differ."""
    step_s: float
    bytes_per_device: float
    complexity: int
    compared: str
    """Its time and complexity against the fastest and the chosen layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSection:
    """A part of the report in words: what it states, then its reasons and details as a list."""

    title: str
    lines: tuple[str, ...] = ()
    points: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTotals:
    """The forecast for the whole run; names as in a receipt."""

    steps: int
    tokens: int
    wall_s: float
    device_hours: float
    energy_wh: float | None
    """At full board power; None where no board power of a device is published."""
    cost_usd: float | None
    """At public on-demand prices; None where a device has no public price."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The plan for one cluster with its figures, and the words that explain it."""

    plan: Plan
    layouts: tuple[WorkerLayout, ...]
    """The layouts that a run would time on the machine itself, before it chooses one of them."""
    search: Search = field(repr=False)
    """All priced layouts, of which the page draws its map and its sweep of bandwidth."""
    machines: str
    """The machines by name and in full, and which of them are used where some are left out."""
    notes: tuple[str, ...]
    """How the machines were read, what was assumed, settings without effect, and warnings."""
    reasons: tuple[str, ...]
    """Why each value that the recipe leaves open was chosen."""
    run: PlannedTotals
    chosen: LayoutFigures
    layout: str
    """The chosen layout in words, and what it leaves out."""
    time: Mapping[str, float]
    """Seconds of the chosen layout's step by item (TIME_NAMES)."""
    memory: Mapping[str, float]
    """Bytes by item (MEMORY_NAMES) on the device with least room left."""
    capacity_bytes: float
    """Memory of that device."""
    mfu: float
    """Model FLOPs utilisation with all of attention's scores counted."""
    mfu_causal: float
    """MFU with the half of the scores that a causal model uses."""
    top: int
    """How many other layouts `sections` names."""
    runners_up: tuple[LayoutFigures, ...]
    training: PlanSection | None = None
    """The first steps of a run on this machine; None for machines on paper."""
    measured: Diagnosis | None = None
    """Why a measured step differs from the forecast, where one was given."""
    money: str = ""
    """The run's cost at a pool's own prices, in words; empty: at the catalogue's prices."""

    @cached_property
    def summary(self) -> tuple[PlanSection, ...]:
        """The words without reasons and details, which take dozens of searches."""
        return _with_questions(self, _answers(self))

    @cached_property
    def sections(self) -> tuple[PlanSection, ...]:
        """All words."""
        return _with_questions(self, _explained(self))

    @property
    def cluster(self) -> str:
        return self.search.cluster.name

    @property
    def model(self) -> str:
        return f"{format_count(parameter_count(self.plan.job.shape))} parameters"

    @property
    def batch(self) -> str:
        w = self.search.workload
        return f"{counted(w.batch_sequences, 'sequence', ',')} of {w.sequence:,} tokens a step, {w.precision}"

    @property
    def tokens_per_s(self) -> float:
        return self.search.workload.batch_tokens / self.chosen.step_s

    def sentences(self, *titles: str) -> list[str]:
        """All that some sections say, one section after the other."""
        by_title = {section.title: (*section.lines, *section.points) for section in self.sections}
        return [sentence for title in titles for sentence in by_title.get(title, ())]


def plan_report_of(
    plan: Plan,
    found: Search,
    *,
    layouts: Sequence[WorkerLayout] = (),
    notes: Sequence[str] = (),
    reasons: Sequence[str] = (),
    top: int = 0,
) -> PlanReport:
    """The report on a plan and the search that it is from, with `top` other layouts."""
    index = found.chosen
    mfu, mfu_causal = model_flops_utilisation(found, index)
    machines = f"{found.cluster.name}: {found.cluster.hardware}"
    if found.left_out:
        machines = f"{devices_text(found.cluster)} of {found.cluster.name}: {found.left_out.cluster.hardware}"
    without = f", leaving out {left_out_text(found)}" if found.left_out else ""
    layout = f"{layout_text(found.candidates.row(index))}{without}"
    return PlanReport(
        plan=plan,
        layouts=tuple(layouts),
        search=found,
        machines=machines,
        notes=tuple(notes),
        reasons=tuple(reasons),
        run=_run_totals(found, plan.job),
        chosen=layout_figures(found, index),
        layout=layout,
        time=time_items(found, index),
        memory=memory_items(found, index),
        capacity_bytes=found.capacity_bytes(index),
        mfu=mfu,
        mfu_causal=mfu_causal,
        top=top,
        runners_up=tuple(layout_figures(found, other) for other in runners_up(found, top)),
    )


def with_measured_step(report: PlanReport, measured_s: float) -> PlanReport:
    """The report with what can explain that a step took as long as measured."""
    return replace(report, measured=diagnose(report.search, measured_s))


def layout_figures(found: Search, index: int) -> LayoutFigures:
    """The figures of one candidate of a search."""
    micro = found.micro_sequences(index)
    return LayoutFigures(
        row=found.candidates.row(index),
        micro_sequences=max(micro),
        micro_limits=micro if len(micro) > 1 else (),
        step_s=float(found.step_s[index]),
        bytes_per_device=found.bytes_per_device(index),
        complexity=int(found.complexity[index]),
        compared=why_not(found, index),
    )


def _with_questions(report: PlanReport, sections: Sequence[PlanSection]) -> tuple[PlanSection, ...]:
    """Sections of every report, with those that answer what was asked: about a run here, or about a measured step."""
    first = [report.training] if report.training else []
    if (measured := report.measured) is None:
        return (*first, *sections)
    lines, points = (verdict_text(measured),), tuple(explanation_lines(measured))
    return (*first, *sections, PlanSection(title="measured", lines=lines, points=points))


def _answers(report: PlanReport) -> tuple[PlanSection, ...]:
    lines = {
        "time": _time(report),
        "memory": memory_text(report.search),
        "money": _money(report),
        "layout": report.layout,
        "step": _step(report),
        "why": chosen_because(report.search),
    }
    return tuple(PlanSection(title=title, lines=(line,)) for title, line in lines.items())


def _explained(report: PlanReport) -> tuple[PlanSection, ...]:
    found = report.search
    who = (*unequal_lines(found, found.chosen), *memory_limit_lines(found, found.chosen))
    refused = sorted(found.refused.items(), key=lambda item: -item[1])
    reasons = "; ".join(f"{reason} ({count:,})" for reason, count in refused)
    priced = f"{counted(len(found.candidates), 'layout', ',')} priced, {found.n_refused:,} refused"
    experts = [PlanSection(title="experts", points=tuple(mixture_lines(found)))] if found.workload.experts else []
    changes = [recipe_layout_changes(found)] if found.constraints else layout_changes(found)
    details = {
        "memory": (_memory_items(found, report.memory),),
        "money": (_energy(report),),
        "layout": (*layout_sentences(report.chosen.row, found.workload.layers), *who),
        "step": _step_details(report),
        "why": tuple(objections(found)),
    }
    return (
        *(replace(answer, points=details.get(answer.title, ())) for answer in _answers(report)),
        *experts,
        PlanSection(title="others", points=tuple(runners_up_lines(found, report.top))),
        PlanSection(title="listed", points=(f"{priced}{reasons and ': '}{reasons}",)),
        PlanSection(title="binds", points=tuple(limits(found))),
        PlanSection(title="changes", points=tuple(changes)),
        PlanSection(title="sure", points=tuple(certainty_lines(found))),
    )


def _time(report: PlanReport) -> str:
    """How long the run takes, and by what arithmetic."""
    run, step, job = report.run, format_duration(report.chosen.step_s), report.plan.job
    is_learnt = job.most_tokens is not None and run.tokens >= job.most_tokens
    end = f"as the text is learned by then, before {job.budget} are over" if is_learnt else f"budget {job.budget}"
    return (
        f"{run_time_text(run)}: {counted(run.steps, 'step', ',')} of {step}, probably {range_text(report.search)}; "
        f"{format_count(run.tokens)} tokens, {format_count(run.device_hours)} device-hours, {end}"
    )


def run_time_text(run: PlannedTotals) -> str:
    """The time of the whole run, in days where it takes two or more."""
    return format_days(run.wall_s)


def run_cost_text(run: PlannedTotals) -> str:
    """The price of the whole run."""
    if run.cost_usd is None:
        return "unknown"
    if run.cost_usd < 0.01:
        return "less than $0.01"
    return f"${run.cost_usd:.2f}" if run.cost_usd < 100 else f"${format_count(run.cost_usd)}"


def _money(report: PlanReport) -> str:
    if report.money:
        return report.money
    cost = run_cost_text(report.run)
    if report.run.cost_usd is None:
        lacking = _names(report.search, "price_per_hour")
        return f"{cost}, because no public price of {lacking} is in the catalogue"
    return f"{cost} at public on-demand prices"


def _energy(report: PlanReport) -> str:
    if report.run.energy_wh is None:
        return f"energy: unknown, because no board power of {_names(report.search, 'watts')} is published"
    spent = format_si(report.run.energy_wh, "Wh")
    return f"energy: {spent} at full board power; hosts, switches and cooling come on top"


def _step(report: PlanReport) -> str:
    tokens_per_s = format_count(report.tokens_per_s)
    used = f"{report.mfu:.1%} of the arithmetic peak (MFU)"
    if report.mfu_causal > 1:  # no device computes faster than its peak
        used = (
            f"{mfu_text(report.mfu_causal)} of the arithmetic peak (MFU), which was measured while the machine was busy"
        )
    return f"{format_duration(report.chosen.step_s)}, {tokens_per_s} tokens a second; {used}"


def _step_details(report: PlanReport) -> tuple[str, ...]:
    step_s = report.chosen.step_s
    parts = [
        f"{TIME_NAMES[name]} {spent / step_s:.0%}"
        for name, spent in _largest(report.time, LEAST_SHARE_MENTIONED * step_s)
    ]
    counting = f"MFU with the half of attention that a causal model uses: {report.mfu_causal:.1%}"
    return (", ".join(parts), *([counting] if report.mfu_causal <= 1 else []))


def memory_text(found: Search) -> str:
    """The chosen layout's memory needs on the device with the least free memory."""
    whole, ranks = found.bytes_per_device(found.chosen), int(found.candidates.pipeline[found.chosen])
    which = "fullest device" if found.assigner.devices.have_equal_memory else "device that has least room left"
    place = f" (place {int(found.memory(found.chosen).rank[0]) + 1} of {ranks} in the pipeline)" if ranks > 1 else ""
    capacity = format_bytes(found.capacity_bytes(found.chosen))
    return f"{format_bytes(whole)} of {capacity} on the {which}{place}"


def _memory_items(found: Search, items: Mapping[str, float]) -> str:
    """The largest items of memory on that device."""
    least = LEAST_SHARE_MENTIONED * found.bytes_per_device(found.chosen)
    return ", ".join(f"{MEMORY_NAMES[name]} {format_bytes(size)}" for name, size in _largest(items, least))


def _largest(items: Mapping[str, float], least: float) -> list[tuple[str, float]]:
    """The items that are worth a word, the largest first."""
    return sorted(((name, value) for name, value in items.items() if value >= least), key=lambda item: -item[1])


def certainty_lines(found: Search) -> list[str]:
    """How reliable the forecast is, and what it assumes without measurement."""
    known = expected_range(found.workload, found.cluster)
    between = f"{known.low:.2f} to {known.high:.2f} times their forecast, so expect {range_text(found)}"
    equally = f"layouts within {found.tolerance:.1%} of each other count as equally fast"
    if was_measured(found.workload, found.cluster):
        assert found.cluster.measured is not None
        return [
            f"arithmetic and messages were measured on these machines ({found.cluster.measured.date}): of {known.rows} "
            f"plans that were chosen so, nine of ten took {between}; {equally}"
        ]
    runs = f"of {known.rows:,} {RANGE_TEXTS[known.kind]} nine of ten" if known.rows else NO_RUNS
    lines = [f"nothing was measured on these machines: {runs} took {between}; {equally}"]
    if known.assumed:
        who = " and ".join(known.assumed)
        lines.append(f"that range is a quarter wider on each side, because rates of {who} are assumed")
    guessed = [island.device.name for island in found.cluster.islands if island.device.achievable is None]
    if guessed:
        lines.append(
            f"nobody has published how much of its arithmetic peak {' or '.join(dict.fromkeys(guessed))} reaches in "
            f"large products; {USUAL_ACHIEVABLE_SHARE:.0%} is assumed"
        )
    alike = {one.name: one for one in (island.device for island in found.cluster.islands) if one.achievable_of}
    for name, device in alike.items():
        lines.append(
            f"nobody has published how much of its arithmetic peak {name} reaches in large products; "
            f"{device.achievable:.0%} is assumed, as of {device.achievable_of}"
        )
    return lines


def expected_range_s(found: Search) -> tuple[float, float]:
    """Between which seconds a step of the chosen layout will probably take."""
    known = expected_range(found.workload, found.cluster)
    return known.low * found.chosen_step_s, known.high * found.chosen_step_s


def range_text(found: Search) -> str:
    """The same for people."""
    low, high = map(format_duration, expected_range_s(found))
    return f"{low} to {high}"


def _run_totals(found: Search, job: TrainingJob) -> PlannedTotals:
    cluster, batch_tokens = found.cluster, found.workload.batch_tokens
    steps = steps_in_budget(job.budget, batch_tokens, step_s=found.chosen_step_s)
    if job.most_tokens is not None:
        steps = min(steps, ceil(job.most_tokens / batch_tokens))
    wall_s = steps * found.chosen_step_s
    hours = wall_s / 3600
    return PlannedTotals(
        steps=steps,
        tokens=steps * batch_tokens,
        wall_s=wall_s,
        device_hours=hours * cluster.hour_devices,
        energy_wh=None if cluster.watts is None else cluster.watts * wall_s / JOULES_PER_WH,
        cost_usd=None if cluster.price_per_hour is None else cluster.price_per_hour * hours,
    )


def _names(found: Search, lacking: Literal["watts", "price_per_hour"]) -> str:
    """The kinds of devices without a published figure."""
    devices = [island.device for island in found.cluster.islands]
    return " and ".join(dict.fromkeys(device.name for device in devices if getattr(device, lacking) is None))
