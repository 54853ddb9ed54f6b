"""What plait's planner says of a case before it is run: every allowed layout, its price, the fastest, the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.lab.grid import Case
from benchmarks.lab.paper_request import paper_request
from plait.errors import PlaitError
from plait.layout import AXES, Layout
from plait.machines.catalog import link_at_rate
from plait.machines.cluster import Cluster, Island, cluster_of_machine
from plait.machines.machine import detect_cpu_machine
from plait.model.shape import ModelShape
from plait.planner.heterogeneous.batch_shares import shares_by_speed
from plait.planner.resolve.named import layout_of, named_degrees, open_constraints
from plait.planner.search.found import Search
from plait.planner.search.search import search
from plait.planner.search.validity import check_layout
from plait.recipe.load import load_recipe
from plait.recipe.schema import RunConfig

TEXT = Path(__file__).parents[2] / "recipes" / "shakespeare.txt"
KNOBS = ("schedule", "stage_layers", "shard_what", "virtual_stages", "micro_sequences", "recompute")
Section = Mapping[str, Any]
"""A recipe's [layout]."""
SWEEP = [10 ** (7 + 3.5 * step / 14) for step in range(15)]
"""Bits a second at which the fastest layout is asked for first: 10 Mbit/s to 30 Gbit/s."""
NARROW = 1.1
"""Closer than this between two rates, a crossing is found well enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A layout to be tried, as a recipe's [layout], with what the planner expects of it."""

    layout: Section
    step_s: float | None
    """None: the planner would not take it, though it can be run."""
    tensor_bytes: float = 0.0
    all_bytes: float = 0.0

    @property
    def name(self) -> str:
        """Short, and different for different layouts."""
        degrees = [f"{axis} {self.layout[axis]}" for axis in AXES if self.layout.get(axis, 1) != 1]
        knobs = [_knob_text(key, self.layout[key]) for key in KNOBS if key in self.layout]
        return ", ".join([" × ".join(degrees), *(text for text in knobs if text)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """All layouts of a case, the predicted fastest first; those without a price last."""

    shape: ModelShape
    priced: tuple[Priced, ...]
    fastest: str
    """Its name."""
    chosen: str
    refused: Mapping[str, str]
    """Degrees that cannot be, and why."""
    crossings: tuple[tuple[float, str, str], ...]
    """(bits a second, the fastest below, the fastest above): where the planner's answer changes."""

    def of(self, name: str) -> Priced:
        return next(one for one in self.priced if one.name == name)


def cluster_of_case(case: Case, flops: Sequence[float], bits_per_s: float) -> Cluster:
    """The case's hosts as the planner sees machines; `flops` as measured on each."""
    machine = replace(detect_cpu_machine(), cores=1)
    seen = [cluster_of_machine(machine, rate).islands[0] for rate in flops]
    alike = len(set(case.cores)) == 1
    islands: tuple[Island, ...] = (replace(seen[0], nodes=case.hosts),) if alike else tuple(seen)
    return Cluster(name=case.name, islands=islands, between=link_at_rate(bits_per_s / 1e9, "machine"))


def forecast(case: Case, cluster: Cluster, folder: Path) -> Forecast:
    """Ask the planner about each layout, and for its own choice; recipes are put into `folder`."""
    free = _config(case, {}, folder)
    request = paper_request(free, cluster)
    shape, whole = request.job.shape, search(request.workload, cluster)
    found: dict[str, Priced] = {}
    for one in (_priced(whole, whole.fastest), _priced(whole, whole.chosen)):
        found.setdefault(one.name, one)
    refused: dict[str, str] = {}
    for section in _sections(case, shape):
        config = _config(case, section, folder)
        if reason := _cannot(config, case, shape):
            refused[_text({axis: section.get(axis, 1) for axis in AXES})] = reason
            continue
        one = _as_pinned(config, cluster, section)
        found.setdefault(one.name, one)
    return Forecast(
        shape=shape,
        priced=tuple(sorted(found.values(), key=lambda one: one.step_s or float("inf"))),
        fastest=_priced(whole, whole.fastest).name,
        chosen=_priced(whole, whole.chosen).name,
        refused=refused,
        crossings=_crossings(whole),
    )


def products(hosts: int) -> list[dict[str, int]]:
    """Every way to write the number of hosts as a product of degrees; those of 1 are left out."""

    def split(left: int, axes: Sequence[str]) -> list[dict[str, int]]:
        if not axes:
            return [{}] if left == 1 else []
        first, *rest = axes
        return [
            {**({first: degree} if degree > 1 else {}), **more}
            for degree in range(1, left + 1)
            if left % degree == 0
            for more in split(left // degree, rest)
        ]

    return split(hosts, AXES)


def _sections(case: Case, shape: ModelShape) -> list[Section]:
    """All products of degrees; where hosts differ, also a pipeline whose stages are as unequal as they are."""
    sections: list[Section] = [*products(case.hosts)]
    if len(set(case.cores)) > 1 and shape.layers >= case.hosts:
        sections.append({"pipeline": case.hosts, "stage_layers": list(shares_by_speed(shape.layers, case.cores))})
    return sections


def recipe_text(case: Case, layout: Section, *, name: str, steps: int) -> str:
    """The recipe that a run of the lab is given: so many steps, one checkpoint at the end, nothing held out."""
    return tomli_w.dumps(
        {
            "run": {"name": name},
            "model": dict(case.shape),
            "data": {"files": str(TEXT), "holdout": 0},
            "train": {
                "budget": f"{steps} steps",
                "sequence": case.sequence,
                "batch_tokens": case.batch_sequences * case.sequence,
                "precision": "float32",
            },
            "layout": dict(layout),
            "checkpoint": {"every": "never"},
            "report": {"every": "1 steps"},
        }
    )


def _config(case: Case, layout: Section, folder: Path) -> RunConfig:
    path = folder / "asked.toml"
    path.write_text(recipe_text(case, layout, name="asked", steps=1))
    return load_recipe(path)


def _cannot(config: RunConfig, case: Case, shape: ModelShape) -> str | None:
    """Why a layout cannot be run at all: INCOMPATIBLE and divisibility, as plait itself says it."""
    try:
        layout = layout_of(config, shape, named_degrees(config) or Layout())
        check_layout(layout, shape, sequence=case.sequence, batch_sequences=case.batch_sequences)
    except PlaitError as error:
        return str(error)
    return None


def _as_pinned(config: RunConfig, cluster: Cluster, section: Section) -> Priced:
    """The planner's own micro-batch and schedule for this section, and its own stages unless they are named."""
    try:
        found = search(paper_request(config, cluster).workload, cluster, constraints=open_constraints(config))
    except PlaitError:
        return Priced(layout=section, step_s=None)
    one = _priced(found, found.chosen)
    return replace(one, layout={**one.layout, **section})


def _priced(found: Search, index: int) -> Priced:
    fullest = found.memory_of_fullest(index)
    return Priced(
        layout=layout_section(found.candidates.row(index)),
        step_s=float(found.step_s[index]),
        tensor_bytes=float(fullest.allocated[0]),
        all_bytes=float(fullest.reserved[0]),
    )


def layout_section(row: Mapping[str, Any]) -> dict[str, int | str]:
    """A row of the planner's table as a recipe's [layout]."""
    section: dict[str, int | str] = {axis: row[axis] for axis in AXES if row[axis] > 1}
    if row["pipeline"] > 1:
        section["schedule"] = row["schedule"]
        section |= {"virtual_stages": row["virtual"]} if row["virtual"] > 1 else {}
    if row["shard"] > 1:
        section["shard_what"] = "parameters" if row["shard_what"] == "parameters" else "optimizer"
    section["micro_sequences"] = row["micro_sequences"]
    section |= {"recompute": row["recompute"]} if row["recompute"] != "none" else {}
    return section


def _crossings(whole: Search) -> tuple[tuple[float, str, str], ...]:
    """Where, over the rates of the cables, another product of degrees becomes the fastest."""

    def between(low: float, below: str, high: float, above: str) -> list[tuple[float, str, str]]:
        middle = (low * high) ** 0.5
        if below == above:
            return []
        if high / low < NARROW:
            return [(middle, below, above)]
        here = _fastest_at(whole, middle)
        return [*between(low, below, middle, here), *between(middle, here, high, above)]

    answers = [(rate, _fastest_at(whole, rate)) for rate in SWEEP]
    return tuple(crossing for first, second in pairwise(answers) for crossing in between(*first, *second))


def _fastest_at(whole: Search, bits_per_s: float) -> str:
    cluster = replace(whole.cluster, between=link_at_rate(bits_per_s / 1e9, "machine"))
    found = search(whole.workload, cluster)
    return _text({axis: int(getattr(found.candidates, axis)[found.fastest]) for axis in AXES})


def _text(degrees: Mapping[str, int]) -> str:
    return " × ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "one host"


def _knob_text(key: str, value: Any) -> str:
    if isinstance(value, list):
        return f"layers {' + '.join(map(str, value))}"
    named = {"micro_sequences": f"{value} at a time", "virtual_stages": f"{value} stages each"}
    return named.get(key, f"recompute {value}" if key == "recompute" else str(value))
