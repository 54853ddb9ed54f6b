"""What `plait plan` says of mixtures on large and small clusters, word for word (UPDATE_GOLDEN=1 writes the texts
again), and whether its answers follow from its numbers."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from plait.commands.planning.plan_report import make_plan_report, plan_report_text
from plait.machines.cluster import read_cluster
from plait.planner.derive.resources import on_paper
from plait.planner.explain.changes import with_faster_links
from plait.planner.explain.experts import CutAxis, axis_choice
from plait.planner.report.report import PlanReport, plan_report_of
from plait.planner.report.report_json import report_values
from plait.planner.search.found import Search
from plait.planner.search.search import search
from plait.recipe.load import load_recipe

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
SMALL = ("layout.replicate=auto", "train.budget=1B tokens", "train.sequence=512", "train.batch_tokens=32768")
OFFICE, BOXES = "mixture-8-office-pcs", "mixture-2-boxes-of-4"
CASES = {
    "deepseek-v3-256xtpu-v5p": ("paper-deepseek-v3", "256xTPUv5p"),
    "deepseek-v3-256xgb200": ("paper-deepseek-v3", "256xGB200"),
    "deepseek-v3-1024xh100": ("paper-deepseek-v3", "1024xH100+400G"),
    "kimi-k2-256xtpu-v5p": ("paper-kimi-k2", "256xTPUv5p"),
    "kimi-k2-256xgb200": ("paper-kimi-k2", "256xGB200"),
    "kimi-k2-1024xh100": ("paper-kimi-k2", "1024xH100+400G"),
    OFFICE: ("07-experts", "8x(1xdesktop)@1G", "model.size=25M", *SMALL),
    BOXES: ("07-experts", "2x(4x4090)@25G", "model.size=350M", *SMALL, "train.batch_tokens=262144"),
}
LARGE = pytest.mark.slow
NAMES = [pytest.param(name, marks=[] if name == OFFICE else LARGE) for name in CASES]


@cache
def answer(name: str) -> PlanReport:
    recipe, cluster, *overrides = CASES[name]
    config = load_recipe(ROOT / "recipes" / f"{recipe}.toml", overrides)
    return make_plan_report(config, on_paper(read_cluster(cluster)), top=5)


@pytest.mark.parametrize("name", NAMES)
def test_the_words_for_mixtures(name: str) -> None:
    text, golden = plan_report_text(answer(name)), GOLDEN / f"plan-{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text(), f"{golden} says otherwise; if the new text is right, write it by UPDATE_GOLDEN=1"


@pytest.mark.parametrize("axis", ["pipeline", "expert"])
@pytest.mark.parametrize("name", [OFFICE, pytest.param(BOXES, marks=LARGE)])
def test_the_answer_turns_where_it_says(name: str, axis: CutAxis) -> None:
    found = whole(name)
    choice = axis_choice(found, axis)
    assert pays(found, axis) == choice.pays
    for factor in (choice.slower, choice.faster):
        if factor is not None:
            away = factor**1.2
            assert pays(searched(found, with_faster_links(found.cluster, choice.link, away)), axis) != choice.pays
            assert (
                pays(searched(found, with_faster_links(found.cluster, choice.link, factor**0.8)), axis) == choice.pays
            )


def whole(name: str) -> Search:
    found = answer(name).search
    return found.left_out.whole if found.left_out else found


def searched(found: Search, cluster: object) -> Search:
    return search(found.workload, cluster, profile=found.profile, tolerance=found.tolerance)  # type: ignore[arg-type]


def pays(found: Search, axis: CutAxis) -> bool:
    """Whether the fastest layout with the axis beats the fastest one without by more than the forecast can tell."""
    has = getattr(found.candidates, axis) > 1
    best = [float(np.where(mask, found.step_s, np.inf).min()) for mask in (has, ~has)]
    return best[0] * (1 + found.tolerance) < best[1]


def test_answers_about_experts_are_in_the_json_and_only_there_where_experts_are() -> None:
    one = answer(OFFICE)
    values = report_values(one)
    assert any(line.startswith("is a pipeline (PP) needed") for line in values["experts"])
    dense = replace(one.search.workload, experts=0)
    found = search(dense, one.search.cluster, profile=one.search.profile)
    assert "experts" not in report_values(plan_report_of(one.plan, found))
