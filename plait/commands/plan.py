"""`plait plan`: what a recipe would take on machines that need not be there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from textwrap import fill

from rich.console import Console

from plait.cluster.cluster import Cluster, cluster_of, read_cluster
from plait.cluster.topology import Machine, usable_cores
from plait.commands.planning.make_plan import grounds_of, look_around
from plait.commands.planning.output_files import check_output, write_output
from plait.commands.planning.workers import crew
from plait.commands.preparing.corpus import corpus_facts, prepared_corpus
from plait.errors import PlaitError
from plait.model.shape import ModelShape, parameter_count
from plait.model.sizes import SIZES
from plait.planner.calibration.factors import UNTAUGHT, Calibration, step_items, taught_words
from plait.planner.derive.model_size import CorpusFacts, batch_sequences, size_up
from plait.planner.diagnosis.diagnose import difference, difference_json, difference_section, seconds_of
from plait.planner.explain.glossary import terms_text
from plait.planner.explain.report import Section, explained, plan_json
from plait.planner.page.page import Chapter, page_html, plotly_script
from plait.planner.problem.software_profile import PLAIT
from plait.planner.problem.workload import Precision, Workload, workload_of
from plait.planner.resolve.constraints import pins_of
from plait.planner.resolve.named_layout import asked_search, named_pins
from plait.planner.search.complexity import table
from plait.planner.search.cost_breakdown import time_items
from plait.planner.search.enumeration import Pins
from plait.planner.search.search import Search
from plait.planner.search.validity import check_layout, layout_of, named_degrees
from plait.planner.step_time.roofline import peak_flops
from plait.recipe.load import load_recipe
from plait.recipe.schema import RunConfig
from plait.units import Amount, format_count

GPT2_VOCABULARY = 50257
USUAL_VOCABULARY = 32768
PLENTY_TOKENS = 10**15
WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A recipe as the planner takes it."""

    shape: ModelShape
    workload: Workload
    budget: Amount
    notes: tuple[str, ...]
    """What was derived or assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The plan for one cluster."""

    asked: Asked
    found: Search
    sections: tuple[Section, ...]


def plan(
    recipe: Path,
    overrides: Sequence[str],
    *,
    clusters: Sequence[str],
    top: int,
    json_file: Path | None,
    html_file: Path | None = None,
    measured: str | None = None,
    screen: Console,
) -> None:
    """Print the plan for each cluster, or for this machine where none is named; raises PlaitError in one sentence."""
    if measured is not None and len(clusters) > 1:
        raise PlaitError("--measured tells of a run on one cluster; name a single --cluster with it")
    check_output(json_file)
    check_output(html_file)
    measured_s = None if measured is None else seconds_of(measured)
    config = load_recipe(recipe, overrides)
    script = plotly_script() if html_file else ""
    if clusters:
        answers = [answer(config, read_cluster(text), top=top) for text in clusters]
    else:
        answers = [_simplest(config, *_this_machine(config), top=top)]
    gap = difference(answers[0].found, measured_s) if measured_s else None
    if gap:
        answers[0] = replace(answers[0], sections=(*answers[0].sections, difference_section(gap)))
    for one in answers:
        screen.print(answer_text(one), markup=False, soft_wrap=True)
    if len(answers) > 1:
        screen.print(side_by_side(answers), markup=False, soft_wrap=True)
    if json_file:
        values = [plan_json(one.found, one.sections, top) for one in answers]
        values[0] |= {"measured": difference_json(gap)} if gap else {}
        write_output(json_file, json.dumps(values[0] if len(values) == 1 else values, indent=2) + "\n")
    if html_file:
        write_output(html_file, page_html([_chapter(one) for one in answers], script))


def terms() -> str:
    """The planner's words and its table of complexity, for someone new."""
    return f"{terms_text()}\nPoints of complexity, added up:\n{table()}"


def answer(config: RunConfig, cluster: Cluster, *, top: int, learnt: Calibration = UNTAUGHT) -> Answer:
    """Plan a recipe on one cluster, with what runs there taught."""
    asked = asked_of(config, cluster)
    stack = replace(PLAIT, calibration=learnt, gradient_transfer=config.train.gradient_transfer)
    found = asked_search(asked.workload, cluster, stack, _checked_pins(config, asked))
    if told := taught_words(learnt, step_items(time_items(found, found.chosen)), "formulas"):
        asked = replace(asked, notes=(*asked.notes, told))
    return Answer(asked=asked, found=found, sections=explained(found, asked.budget, top=top))


def _checked_pins(config: RunConfig, asked: Asked) -> Pins:
    """What the recipe settles of the layout; raises PlaitError where a named one cannot carry model and batch."""
    pins = pins_of(config)
    if not pins.degrees and not pins.stage_layers:
        return pins
    named, w = layout_of(config, asked.shape, named_degrees(config)), asked.workload
    check_layout(named, asked.shape, sequence=w.sequence, batch_sequences=w.batch_sequences)
    return named_pins(config, named)


def asked_of(config: RunConfig, cluster: Cluster) -> Asked:
    """The model, its batch and its budget; what hangs on text that was not looked at takes usual values and says so."""
    notes: list[str] = []
    precision = _precision(config, cluster)
    peak = sum(island.devices * peak_flops(island.device, precision) for island in cluster.islands)
    machine = Machine(device="cuda", name=cluster.name, devices=cluster.devices, cores=1, memory_bytes=1, versions=())
    scale = size_up(config, _corpus(config, notes), machine, peak, notes)
    batch = batch_sequences(config, scale, notes)
    workload = workload_of(scale.shape, sequence=scale.shape.sequence, batch_sequences=batch, precision=precision)
    return Asked(shape=scale.shape, workload=workload, budget=scale.budget, notes=tuple(notes))


def answer_text(one: Answer) -> str:
    """The whole answer for people."""
    asked, cluster = one.asked, one.found.cluster
    w = asked.workload
    lines = [
        f"plan     {format_count(parameter_count(asked.shape))} parameters on {cluster.name}: {_devices(cluster)}",
        f"batch    {w.batch_sequences:,} sequences of {w.sequence:,} tokens a step, {w.precision}",
        *(f"         · {note}" for note in asked.notes),
    ]
    for section in one.sections:
        lines += [f"{section.title if first == 0 else '':8} {line}" for first, line in enumerate(section.lines)]
    return "\n".join(_wrapped(line) for line in lines) + "\n"


def _wrapped(line: str) -> str:
    indent = " " * (11 if line[9:10] == "·" else 9)
    return fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def side_by_side(answers: Sequence[Answer]) -> str:
    """Several clusters in a table."""
    rows = [("cluster", "step", "tokens/s", "layout")]
    for one in answers:
        step_s = float(one.found.step_s[one.found.chosen])
        tokens = format_count(one.asked.workload.tokens / step_s)
        rows.append((one.found.cluster.name, f"{step_s:.3g} s", tokens, one.sections[0].lines[0]))
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, wide, strict=False)), row[3]]) for row in rows
    )


def _devices(cluster: Cluster) -> str:
    islands = [f"{i.nodes} × ({i.per_node} × {i.device.name})" for i in cluster.islands]
    joined = f", joined by {cluster.between.name}" if cluster.nodes > 1 else ""
    return " + ".join(islands) + joined


def _chapter(one: Answer) -> Chapter:
    return Chapter(
        found=one.found,
        parameters=parameter_count(one.asked.shape),
        machines=_devices(one.found.cluster),
        notes=one.asked.notes,
        sections=one.sections,
    )


def _precision(config: RunConfig, cluster: Cluster) -> Precision:
    if config.train.precision != "auto":
        return config.train.precision
    return "float32" if any(island.device.kind == "cpu" for island in cluster.islands) else "bf16"


def _corpus(config: RunConfig, notes: list[str]) -> CorpusFacts:
    """The recipe's text where it was prepared before, else what is usual: a plan needs no text."""
    try:
        corpus = prepared_corpus(config)
    except PlaitError:  # it lies on the machines that are planned for
        corpus = None
    return corpus_facts(corpus) if corpus else _usual_corpus(config, notes)


def _usual_corpus(config: RunConfig, notes: list[str]) -> CorpusFacts:
    """Text enough, and the vocabulary that the recipe or the size usually has."""
    size, asked = config.model.size, config.model.vocabulary
    if asked != "auto":
        vocabulary = asked
    elif config.data.tokenizer == "gpt2":
        vocabulary = GPT2_VOCABULARY
    else:
        vocabulary = SIZES[size].vocabulary if size in SIZES else USUAL_VOCABULARY
        notes.append(f"vocabulary {vocabulary}: usual for this size; the text was not looked at")
    return CorpusFacts(
        folder="",
        content_hash="",
        vocabulary=vocabulary,
        train_tokens=PLENTY_TOKENS,
        longest_sequence=PLENTY_TOKENS,
        heldout_tokens=0,
        documents=1,
    )


def _this_machine(config: RunConfig) -> tuple[list[Cluster], Calibration]:
    """The ways to use this machine: a processor serves as one device or as several that share it; and what runs taught
    of it."""
    with crew() as workers:
        site = look_around(workers, usable_cores())
        grounds = grounds_of(site, workers)
    machine, flops = site.machine, site.peak_flops if site.machine.device == "cpu" else None
    named = prod(named_degrees(config).values()) if named_degrees(config) else None
    counts = [named] if named and machine.device == "cpu" else replace(grounds, peak_flops=flops).worker_counts()
    ways = [cluster_of(machine, flops, workers=count) for count in counts]
    return ways, grounds.recall(_precision(config, ways[0]), "formulas")


def _simplest(config: RunConfig, ways: Sequence[Cluster], learnt: Calibration, *, top: int) -> Answer:
    """Of the ways to use one machine the simplest that is about as fast as the fastest, by the forecast."""
    answers: list[Answer] = []
    refusals: list[PlaitError] = []
    for way in ways:
        try:
            answers.append(answer(config, way, top=top, learnt=learnt))
        except PlaitError as error:  # as two devices it may hold no model that it holds as one
            refusals.append(error)
    if not answers:
        raise refusals[0]
    step_s = [float(each.found.step_s[each.found.chosen]) for each in answers]
    limit = min(step_s) * (1 + answers[0].found.tolerance)
    enough = [each for each, spent in zip(answers, step_s, strict=True) if spent <= limit]
    return min(enough, key=lambda each: (int(each.found.points[each.found.chosen]), each.found.cluster.devices))
