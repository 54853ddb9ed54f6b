"""The answer of `plait plan` for one cluster, made once: text, JSON and the page with pictures render it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from plait.model.shape import parameter_count
from plait.planner.derive.intervals import steps_in_budget
from plait.planner.explain.changes import layout_changes
from plait.planner.explain.choice import LEAST_SHARE_MENTIONED, choice_reasons, devices_text, left_out_text, limits
from plait.planner.explain.compared_layouts import recipe_layout_changes, runners_up, runners_up_lines, why_not
from plait.planner.explain.experts import mixture_lines
from plait.planner.explain.unequal_devices import memory_limit_lines, unequal_lines
from plait.planner.plan import Plan
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
from plait.planner.search.model_error import RunFamily, published_errors, run_family
from plait.planner.step_time.device_rates import USUAL_ACHIEVABLE_SHARE
from plait.planner.step_time.device_time import was_measured
from plait.report.plausibility import mfu_text
from plait.units import Amount, counted, format_bytes, format_count, format_duration, format_si

JOULES_PER_WH = 3600
RUN_FAMILY_TEXTS: Mapping[RunFamily, str] = {
    "dense-gpu": "dense models on GPUs",
    "moe": "models with experts on GPUs",
    "tpu": "models on TPUs",
    "cpu": "no run on processors is published",
}


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
    """A part of the report in words: what it states, then a list."""

    title: str
    lines: tuple[str, ...] = ()
    points: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """Sentences about values that were derived or assumed."""
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
    """The same with the half that a causal model uses."""
    runners_up: tuple[LayoutFigures, ...]
    sections: tuple[PlanSection, ...] = ()
    measured: Diagnosis | None = None
    """Why a measured step differs from the forecast, where one was given."""

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

    def points(self, *titles: str) -> list[str]:
        """The lists of some sections, one after the other."""
        by_title = {section.title: section.points for section in self.sections}
        return [point for title in titles for point in by_title.get(title, ())]


def plan_report_of(
    plan: Plan, found: Search, *, layouts: Sequence[WorkerLayout] = (), notes: Sequence[str] = (), top: int = 0
) -> PlanReport:
    """The report on a plan and the search that it is from, with `top` other layouts."""
    index = found.chosen
    mfu, mfu_causal = model_flops_utilisation(found, index)
    machines = f"{found.cluster.name}: {found.cluster.hardware}"
    if found.left_out:
        machines = f"{devices_text(found.cluster)} of {found.cluster.name}: {found.left_out.cluster.hardware}"
    without = f", leaving out {left_out_text(found)}" if found.left_out else ""
    layout = f"{layout_text(found.candidates.row(index))}{without}"
    figures = PlanReport(
        plan=plan,
        layouts=tuple(layouts),
        search=found,
        machines=machines,
        notes=tuple(notes),
        chosen=layout_figures(found, index),
        layout=layout,
        time=time_items(found, index),
        memory=memory_items(found, index),
        capacity_bytes=found.capacity_bytes(index),
        mfu=mfu,
        mfu_causal=mfu_causal,
        runners_up=tuple(layout_figures(found, other) for other in runners_up(found, top)),
    )
    return replace(figures, sections=_sections(figures, top))


def with_measured_step(report: PlanReport, measured_s: float) -> PlanReport:
    """The report with what can explain that a step took as long as measured."""
    measured = diagnose(report.search, measured_s)
    lines, points = (verdict_text(measured),), tuple(explanation_lines(measured))
    words = PlanSection(title="measured", lines=lines, points=points)
    return replace(report, measured=measured, sections=(*report.sections, words))


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


def _sections(report: PlanReport, top: int) -> tuple[PlanSection, ...]:
    found = report.search
    who = (*unequal_lines(found, found.chosen), *memory_limit_lines(found, found.chosen))
    refused = sorted(found.refused.items(), key=lambda item: -item[1])
    reasons = "; ".join(f"{reason} ({count:,})" for reason, count in refused)
    priced = f"{counted(len(found.candidates), 'layout', ',')} priced, {found.n_refused:,} refused"
    experts = [PlanSection(title="experts", points=tuple(mixture_lines(found)))] if found.workload.experts else []
    changes = [recipe_layout_changes(found)] if found.constraints else layout_changes(found)
    return (
        PlanSection(
            title="layout",
            lines=(report.layout,),
            points=(*layout_sentences(report.chosen.row, found.workload.layers), *who),
        ),
        PlanSection(title="step", lines=_step(report)),
        PlanSection(title="memory", lines=(memory_text(found, report.memory),)),
        PlanSection(title="why", points=tuple(choice_reasons(found))),
        *experts,
        PlanSection(title="others", points=tuple(runners_up_lines(found, top))),
        PlanSection(title="listed", lines=(f"{priced}{reasons and ': '}{reasons}",)),
        PlanSection(title="binds", points=tuple(limits(found))),
        PlanSection(title="changes", points=tuple(changes)),
        PlanSection(title="sure", points=tuple(certainty_lines(found))),
        PlanSection(title="run", points=tuple(_run_totals(found, report.plan.job.budget))),
    )


def _step(report: PlanReport) -> tuple[str, str]:
    step_s = report.chosen.step_s
    parts = [
        f"{TIME_NAMES[name]} {spent / step_s:.0%}"
        for name, spent in _largest(report.time, LEAST_SHARE_MENTIONED * step_s)
    ]
    used = (
        f"{report.mfu:.1%} of the arithmetic peak (MFU) with all of attention counted, {report.mfu_causal:.1%} with "
        "the half that a causal model uses"
    )
    if report.mfu_causal > 1:  # no device computes faster than its peak
        used = (
            f"{mfu_text(report.mfu_causal)} of the arithmetic peak (MFU), which was measured while the machine was busy"
        )
    tokens_per_s = format_count(report.tokens_per_s)
    return f"{format_duration(step_s)}, {tokens_per_s} tokens a second; {used}", ", ".join(parts)


def memory_text(found: Search, items: Mapping[str, float]) -> str:
    """What the chosen layout needs on the device with least room left, and what fills it."""
    whole, ranks = found.bytes_per_device(found.chosen), int(found.candidates.pipeline[found.chosen])
    parts = [
        f"{MEMORY_NAMES[name]} {format_bytes(size)}" for name, size in _largest(items, LEAST_SHARE_MENTIONED * whole)
    ]
    which = "fullest device" if found.assigner.devices.have_equal_memory else "device that has least room left"
    place = f" (place {int(found.memory(found.chosen).rank[0]) + 1} of {ranks} in the pipeline)" if ranks > 1 else ""
    capacity = format_bytes(found.capacity_bytes(found.chosen))
    return f"{format_bytes(whole)} of {capacity} on the {which}{place}: {', '.join(parts)}"


def _largest(items: Mapping[str, float], least: float) -> list[tuple[str, float]]:
    """The items that are worth a word, the largest first."""
    return sorted(((name, value) for name, value in items.items() if value >= least), key=lambda item: -item[1])


def certainty_lines(found: Search) -> list[str]:
    """How reliable the forecast is, and what it assumes without measurement."""
    low, high = (format_duration(found.chosen_step_s * (1 + side * found.tolerance)) for side in (-1, 1))
    equally = f"layouts within {found.tolerance:.1%} of each other count as equally fast"
    if was_measured(found.workload, found.cluster):
        assert found.cluster.measured is not None
        return [
            f"arithmetic and messages were measured on these machines ({found.cluster.measured.date}): {equally}; "
            f"expect {low} to {high}"
        ]
    lines = [f"nothing was measured on these machines: {_record(found)}, so expect {low} to {high}; {equally}"]
    guessed = [island.device.name for island in found.cluster.islands if island.device.achievable is None]
    if guessed:
        lines.append(
            f"nobody has published how much of its arithmetic peak {' or '.join(dict.fromkeys(guessed))} reaches in "
            f"large products; {USUAL_ACHIEVABLE_SHARE:.0%} is assumed"
        )
    return lines


def _record(found: Search) -> str:
    """How far off forecasts like this one have been."""
    family = run_family(found.workload, found.cluster)
    known = published_errors(family)
    errors = f"half were forecast within {known.median:.0%}, nine of ten within {known.p90:.0%}"
    if not known.rows:
        return f"{RUN_FAMILY_TEXTS[family]}; elsewhere, where the model did worst, {errors}"
    return f"of {known.rows:,} published runs of {RUN_FAMILY_TEXTS[family]} {errors}"


def _run_totals(found: Search, budget: Amount) -> list[str]:
    """What the whole run comes to: steps, hours, device-hours, energy, money; what no public figure tells is said."""
    cluster, batch_tokens = found.cluster, found.workload.batch_tokens
    steps = steps_in_budget(budget, batch_tokens, step_s=found.chosen_step_s)
    seconds = steps * found.chosen_step_s
    hours, days = seconds / 3600, seconds / 86400
    time = f"{days:.1f} days" if days >= 2 else format_duration(seconds)
    energy = f"unknown, because no board power of {_names(found, 'watts')} is published"
    if cluster.watts is not None:
        spent = format_si(cluster.watts * seconds / JOULES_PER_WH, "Wh")
        energy = f"{spent} at full board power; hosts, switches and cooling come on top"
    money = f"unknown, because no public price of {_names(found, 'price_per_hour')} is in the catalogue"
    if cluster.price_per_hour is not None:
        usd = cluster.price_per_hour * hours
        money = f"{f'${format_count(usd)}' if usd >= 0.01 else 'less than $0.01'} at public on-demand prices"
    return [
        f"{counted(steps, 'step', ',')}, {format_count(steps * batch_tokens)} tokens, for a budget of {budget}: "
        f"{time}, {format_count(hours * cluster.hour_devices)} device-hours",
        f"energy: {energy}",
        f"money: {money}",
    ]


def _names(found: Search, lacking: Literal["watts", "price_per_hour"]) -> str:
    """The kinds of devices of which nobody knows a figure."""
    devices = [island.device for island in found.cluster.islands]
    return " and ".join(dict.fromkeys(device.name for device in devices if getattr(device, lacking) is None))
