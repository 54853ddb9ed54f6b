"""A tiny run as values: its recipe and plan, in a folder where ranks find them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
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
    corpus = open_corpus(_prepared(config, folder / "cache"))
    outline = draft(config, corpus_facts(corpus), Resources(machine=MACHINE, peak_flops=1e11), recipe_hash="")
    plan = changed(settle(config, outline, outline.layouts), threads=1, **planned)
    put(folder, config, plan)
    return config, plan


def _prepared(config: RunConfig, folder: Path) -> Path:
    """The prepared data of the recipe, in that folder: data that an earlier test prepared alike are copied into it,
    where preparing finds them, because training a tokenizer takes longer than all else here."""
    request = data_request(config)
    alike = Path(_caches().name) / sha256(repr(replace(request, sources=())).encode()).hexdigest()
    if alike.exists() and not folder.exists():
        copytree(alike, folder)
    prepared = prepare_corpus(request, folder, lambda *_: None)
    if not alike.exists():
        copytree(folder, alike)
    return prepared


@cache
def _caches() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="plait-tests-tiny-")


def put(folder: Path, config: RunConfig, plan: Plan) -> None:
    """Make these the recipe and plan that the ranks read."""
    (folder / "recipe.toml").write_text(recipe_text(config))
    write_plan(plan, folder / "plan.json")
