"""The planner's answer for people and for programs: what was chosen, why that is enough, what would change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.planner.explain.compared_layouts import (
    complexity_compared,
    recipe_layout_changes,
    recipe_layout_reason,
    slower_than_fastest,
    time_compared,
    tolerance_text,
    why_not,
)
from plait.planner.explain.confidence import certainty_lines, idle_machine_lines, layout_changes
from plait.planner.explain.island_traffic import island_traffic_lines
from plait.planner.explain.left_out import left_out_lines, left_out_text
from plait.planner.explain.mixtures import load_lines, mixture_lines
from plait.planner.explain.objective_lines import objective_lines
from plait.planner.explain.totals import run_totals
from plait.planner.explain.unequal_devices import memory_limit_lines, unequal_lines, unequal_reasons
from plait.planner.plan import WARNING
from plait.planner.problem.candidates import Counts
from plait.planner.search.cost_breakdown import (
    MEMORY_NAMES,
    TIME_NAMES,
    bottlenecks,
    memory_items,
    message_seconds,
    model_flops_utilisation,
    time_items,
)
from plait.planner.search.found import Search
from plait.planner.search.layout_kinds import kind_text, kinds_of, layout_sentences, layout_text
from plait.planner.search.model_error import memory_error
from plait.report.plausibility import mfu_text
from plait.units import Amount, counted, format_bytes, format_count, format_duration

SIMPLER_KINDS_NAMED = 4
"""Kinds of simpler layouts that the report names, the fastest first."""
LEAST_SHARE_MENTIONED = 0.01
"""Share of a step or of a device's memory from which an item is named."""


TEXT_HEADINGS = {"listed": "compared", "binds": "limits", "changes": "what if", "sure": "accuracy"}
"""What a section is called in the text where it is not its title, which programs read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSection:
    """A heading and its lines."""

    title: str
    lines: tuple[str, ...]


def report_sections(found: Search, budget: Amount, *, top: int) -> tuple[PlanSection, ...]:
    """The whole report, section by section, with `top` other layouts."""
    chosen = found.candidates.row(found.chosen)
    who = [*unequal_lines(found, found.chosen), *memory_limit_lines(found, found.chosen)]
    without = f", leaving out {left_out_text(found)}" if found.left_out else ""
    sections = {
        "layout": [
            f"{layout_text(chosen)}{without}",
            *_dots([*layout_sentences(chosen, found.workload.layers), *who]),
        ],
        "step": _step(found),
        "memory": _memory(found),
        "why": _dots(choice_reasons(found)),
        **({"experts": _dots(mixture_lines(found))} if found.workload.experts else {}),
        "others": _dots(runners_up_lines(found, top)),
        "listed": [_counts(found)],
        "binds": _dots(_binds(found)),
        "changes": _dots([recipe_layout_changes(found)] if found.constraints else layout_changes(found)),
        "sure": _dots(certainty_lines(found)),
        "run": _dots(run_totals(found, budget)),
    }
    return tuple(PlanSection(title=title, lines=tuple(lines)) for title, lines in sections.items())


def short_reasons(found: Search) -> tuple[str, ...]:
    """The choice in a few sentences, for the head of a run: why this layout, what binds, what would change it."""
    if found.cluster.n_devices == 1:
        return (*left_out_lines(found), *_binds(found)[:1])
    first = recipe_layout_reason(found) if found.constraints else _price_of_simplicity(found)
    changed = [] if found.constraints else [line for line in layout_changes(found) if "would be chosen" in line]
    who = (*left_out_lines(found), *island_traffic_lines(found), *unequal_lines(found, found.chosen))
    return (first, *who, *unequal_reasons(found), *load_lines(found), *_binds(found)[:2], *changed[:2])


def runners_up(found: Search, top: int | None = None) -> list[int]:
    """The next best layouts, `top` of them or all: the fastest of each kind and of each way to cut the model, beside
    the chosen one."""
    c = found.candidates
    combinations = np.stack([kinds_of(c), c.pipeline, c.tensor])
    order = np.lexsort([found.complexity, found.step_s])
    _, first = np.unique(combinations[:, order], axis=1, return_index=True)
    own = (combinations == combinations[:, [found.chosen]]).all(axis=0)
    return [int(order[place]) for place in np.sort(first) if not own[order[place]]][:top]


def choice_reasons(found: Search) -> list[str]:
    """Why this layout is enough, and what stands against simpler ones."""
    reasons = [
        recipe_layout_reason(found) if found.constraints else _price_of_simplicity(found),
        *left_out_lines(found),
    ]
    there = found.capacity_bytes(found.chosen)
    for words, bytes_ in _too_large(found):
        much = (
            f"a device, which has {format_bytes(there)}"
            if bytes_ > there
            else f"of {format_bytes(there)} a device, which leaves too little free ({_memory_doubt(found)})"
        )
        reasons.append(f"{words}: simpler, but this needs {format_bytes(bytes_)} {much}")
    here, by_kind = int(found.complexity[found.chosen]), best_of_kinds(found)
    for index in by_kind[found.complexity[by_kind] < here][:SIMPLER_KINDS_NAMED]:
        kind, points = kind_text(found.candidates.row(int(index))), complexity_compared(found, int(index))
        reasons.append(f"{kind}: {points} the chosen layout, but it takes {time_compared(found, int(index))}")
    return (
        reasons
        + objective_lines(found)
        + island_traffic_lines(found)
        + unequal_reasons(found)
        + idle_machine_lines(found)
    )


def runners_up_lines(found: Search, top: int) -> list[str]:
    """What the other layouts would cost and why they lost; where none is listed, why there is none."""
    others = runners_up(found)
    if others and not top:
        return [f"{counted(len(others), 'other kind', ',')} of layout would fit; --top N lists the fastest N of them"]
    if others:
        return [f"{layout_text(found.candidates.row(index))}: {why_not(found, index)}" for index in others[:top]]
    if found.constraints:
        return ["no other kind of layout was priced: [layout] of the recipe allows this kind alone"]
    if found.cluster.n_devices == 1:
        on_processor = found.cluster.islands[0].device.kind == "cpu"
        return [f"one {'worker' if on_processor else 'device'} has no other kind of layout"]
    return ["these devices have no other kind of layout that fits"]


def best_of_kinds(found: Search) -> Counts:
    """The fastest layout of every kind, the fastest first."""
    order = np.argsort(found.step_s, kind="stable")
    _, first = np.unique(kinds_of(found.candidates)[order], return_index=True)
    return order[np.sort(first)]


def _dots(lines: Sequence[str]) -> list[str]:
    return [f"· {line}" for line in lines]


def _step(found: Search) -> list[str]:
    step_s, (full, causal) = float(found.step_s[found.chosen]), model_flops_utilisation(found, found.chosen)
    items = sorted(time_items(found, found.chosen).items(), key=lambda item: -item[1])
    parts = [
        f"{TIME_NAMES[name]} {spent / step_s:.0%}" for name, spent in items if spent >= LEAST_SHARE_MENTIONED * step_s
    ]
    tokens_per_s = found.workload.batch_tokens / step_s
    used = (
        f"{full:.1%} of the arithmetic peak (MFU) with all of attention counted, {causal:.1%} with the half that a "
        "causal model uses"
    )
    if causal > 1:  # no device computes faster than its peak
        used = f"{mfu_text(causal)} of the arithmetic peak (MFU), which was measured while the machine was busy"
    return [
        f"{format_duration(step_s)}, {format_count(tokens_per_s)} tokens a second; {used}",
        ", ".join(parts),
    ]


def _memory(found: Search) -> list[str]:
    capacity = found.capacity_bytes(found.chosen)
    names = {**MEMORY_NAMES, "reserve": "the allocator's and the driver's own"}
    items = sorted(memory_items(found, found.chosen).items(), key=lambda item: -item[1])
    whole = found.bytes_per_device(found.chosen)
    parts = [f"{names[name]} {format_bytes(size)}" for name, size in items if size >= LEAST_SHARE_MENTIONED * whole]
    which = "fullest device" if found.assigner.devices.have_equal_memory else "device that has least room left"
    ranks = int(found.candidates.pipeline[found.chosen])
    place = f" (place {int(found.memory(found.chosen).rank[0]) + 1} of {ranks} in the pipeline)" if ranks > 1 else ""
    return [f"{format_bytes(whole)} of {format_bytes(capacity)} on the {which}{place}: {', '.join(parts)}"]


def _price_of_simplicity(found: Search) -> str:
    if found.chosen == found.fastest:
        where = " on the devices that it uses" if found.left_out else ""
        return (
            f"the fastest of {counted(len(found.candidates), 'layout', ',')} that fit{where}; "
            f"none within {tolerance_text(found)} is simpler"
        )
    if found.complexity[found.chosen] == found.complexity[found.fastest]:
        return f"as simple as the fastest of {counted(len(found.candidates), 'layout', ',')} that fit, and as fast"
    fastest = f"{layout_text(found.candidates.row(found.fastest))}, takes {format_duration(found.best_step_s)}"
    return (
        f"the simplest within {tolerance_text(found)} of the fastest, which is less than this forecast can tell: the "
        f"fastest, {fastest}; the chosen layout is {slower_than_fastest(found, found.chosen)}"
    )


def _too_large(found: Search) -> list[tuple[str, float]]:
    """Ways to train on all devices that cut nothing of the model, and do not fit."""
    simple = {
        1: "plain copies of the model",
        2: "copies that split the optimizer state",
        4: "parameters split, nothing else",
    }
    return [(words, found.leanest_bytes[kind]) for kind, words in simple.items() if kind in found.kinds_too_large]


def _memory_doubt(found: Search) -> str:
    return f"memory forecasts of such runs are off by {memory_error(found.workload, found.cluster):.1%} in the median"


def _counts(found: Search) -> str:
    refused = sorted(found.refused.items(), key=lambda item: -item[1])
    text = "; ".join(f"{reason} ({count:,})" for reason, count in refused)
    return f"{counted(len(found.candidates), 'layout', ',')} priced, {found.n_refused:,} refused{text and ': '}{text}"


def _binds(found: Search) -> list[str]:
    parts = [(what, share) for what, share in bottlenecks(time_items(found, found.chosen)) if share >= 0.05]
    lines = ["what the step's time goes into: " + ", ".join(f"{what} {share:.0%}" for what, share in parts)]
    hidden, exposed = message_seconds(found, found.chosen)
    if hidden + exposed > LEAST_SHARE_MENTIONED * found.step_s[found.chosen]:
        more = f"; another {format_duration(hidden)} pass while they compute" if hidden > 0 else ""
        lines.append(f"messages between devices: devices wait {format_duration(exposed)} of a step for them{more}")
    capacity = found.capacity_bytes(found.chosen)
    if found.bytes_per_device(found.chosen) > capacity:
        lines.append(f"{WARNING}memory is short: this layout fits only if the allocator and the driver waste nothing")
    elif not found.fits_sparingly(found.chosen):
        free = format_bytes(capacity - found.bytes_per_device(found.chosen))
        lines.append(
            f"memory is tight: {free} of {format_bytes(capacity)} stay free on a device, and {_memory_doubt(found)}"
        )
    elif found.bytes_per_device(found.chosen) > 0.85 * capacity or _too_large(found):
        lines.append("memory limits the choice: with more of it other layouts would fit, too")
    return lines
