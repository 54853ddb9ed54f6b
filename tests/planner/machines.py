"""Machines and corpora as values, to plan for on any desk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from plait.machines.machine import Machine
from plait.model.shape import ModelShape
from plait.planner.derive.model_size import BaseFacts, CorpusFacts
from plait.planner.derive.resources import Resources
from plait.planner.plan import Plan
from plait.planner.resolve.resolve import Draft, draft, settle
from plait.planner.resolve.worker_layouts import WorkerLayout
from plait.recipe.load import load_recipe
from plait.recipe.schema import RunConfig

VERSIONS = (("plait", "0.1.0"), ("torch", "2.13.0"))
LAPTOP = Machine(
    device="cpu", name="a laptop's processor", devices=1, cores=8, memory_bytes=16 * 2**30, versions=VERSIONS
)
SERVER = Machine(
    device="cpu", name="a server's processor", devices=1, cores=64, memory_bytes=256 * 2**30, versions=VERSIONS
)
ONE_H100 = Machine(
    device="cuda", name="NVIDIA H100 80GB HBM3", devices=1, cores=24, memory_bytes=80 * 2**30, versions=VERSIONS
)
EIGHT_H100 = Machine(
    device="cuda", name="NVIDIA H100 80GB HBM3", devices=8, cores=192, memory_bytes=80 * 2**30, versions=VERSIONS
)
PEAK_FLOPS = {LAPTOP: 4e11, SERVER: 4e12, ONE_H100: 989e12, EIGHT_H100: 8 * 989e12}


def corpus(train_tokens: int, documents: int, vocabulary: int = 4096) -> CorpusFacts:
    return CorpusFacts(
        folder="/data/corpus",
        content_hash="f00d",
        vocabulary=vocabulary,
        train_tokens=train_tokens,
        longest_sequence=train_tokens - 1,
        heldout_tokens=train_tokens // 19,
        documents=documents,
    )


PLAYS = corpus(1_500_000, 1)
STORIES = corpus(450_000_000, 2_000_000, 8192)
WEB = corpus(100_000_000_000, 80_000_000, 50257)
SMOLLM2 = ModelShape(
    layers=30, width=576, heads=9, kv_heads=3, head_width=64, ffn=1536, vocabulary=49152, sequence=8192,
    rope_theta=1e5, tied=True,
)  # fmt: skip
CHATS = replace(corpus(90_000, 2_000, 49152), base=BaseFacts(folder="/models/smollm2", shape=SMOLLM2, fingerprint="f1"))
"""2,000 conversations of 45 tokens, and the model that is to learn them."""


def recipe(folder: Path, *overrides: str) -> RunConfig:
    path = folder / "recipe.toml"
    path.write_text('[data]\nfiles = "text.txt"\n')
    return load_recipe(path, overrides)


def drafted(config: RunConfig, facts: CorpusFacts, machine: Machine) -> Draft:
    resources = Resources(machine=machine, peak_flops=PEAK_FLOPS.get(machine))
    return draft(config, facts, resources, recipe_hash="cafe")


def timed(split: WorkerLayout, whole_s: float) -> WorkerLayout:
    """As if a step took so long on one core, and workers lost a little to each other and threads somewhat more."""
    return replace(split, step_s=whole_s / split.workers / split.placement.threads**0.8 + 0.001 * split.workers)


def without_reasons(layouts: Sequence[WorkerLayout]) -> tuple[WorkerLayout, ...]:
    """The layouts without the sentences on why each was chosen, which take dozens of searches."""
    return tuple(replace(one, chosen_in=None) for one in layouts)


def planned(
    config: RunConfig,
    facts: CorpusFacts,
    machine: Machine,
    whole_s: float = 4.0,
    *,
    why_this_layout: Literal["left out", "searched"] = "left out",
) -> Plan:
    """The settled plan, with made-up measurements where some are needed."""
    outline = drafted(config, facts, machine)
    measured = outline.layouts
    if why_this_layout == "left out":
        measured = without_reasons(measured)
    if len(measured) > 1 or outline.plan.job.budget.unit == "seconds":
        measured = tuple(timed(split, whole_s) for split in measured)
    return settle(config, outline, measured)
