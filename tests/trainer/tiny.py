"""A tiny run as values: its recipe and plan, in a folder where ranks find them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plait.commands.preparing.corpus import corpus_facts, data_request
from plait.data.preparation.prepare import prepare_corpus
from plait.data.shards import open_corpus
from plait.machines.machine import Machine
from plait.planner.derive.resources import Resources
from plait.planner.plan import Plan
from plait.planner.plan_file import write_plan
from plait.planner.resolve.resolve import draft, settle
from plait.recipe.load import load_recipe, recipe_text
from plait.recipe.schema import RunConfig
from tests.plans import changed

SEQUENCES = 7
MACHINE = Machine(
    device="cpu", name="a test's processor", devices=1, cores=4, memory_bytes=2**33, versions=(("torch", "x"),)
)
RECIPE = """
[data]
files = "rows.jsonl"
holdout = 0.2

[model]
layers = 2
width = 16
heads = 2
vocabulary = 280

[train]
sequence = 8
batch_tokens = 56
budget = "20 steps"

[optimizer]
lr = 0.01
warmup_steps = 2

[layout]
replicate = 1
micro_sequences = 3
"""


def make_tiny(folder: Path, *overrides: str, **planned: Any) -> tuple[RunConfig, Plan]:
    """Prepare data of many short documents and write recipe.toml and plan.json, with the given fields of the plan."""
    rows = [json.dumps({"text": " ".join("abcdefgh"[: 2 + i % 5]) * (1 + i % 3)}) for i in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "tiny.toml").write_text(RECIPE)
    config = load_recipe(folder / "tiny.toml", overrides)
    corpus = open_corpus(prepare_corpus(data_request(config), folder / "cache", lambda *_: None))
    outline = draft(config, corpus_facts(corpus), Resources(machine=MACHINE, peak_flops=1e11), recipe_hash="")
    plan = changed(settle(config, outline, outline.layouts), threads=1, **planned)
    put(folder, config, plan)
    return config, plan


def put(folder: Path, config: RunConfig, plan: Plan) -> None:
    """Make these the recipe and plan that the ranks read."""
    (folder / "recipe.toml").write_text(recipe_text(config))
    write_plan(plan, folder / "plan.json")
