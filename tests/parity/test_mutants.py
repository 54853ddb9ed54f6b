"""Verify can go red: bugs known from the field, put into a copy of plait, are all caught."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.small_model import requested_layout, requested_shares, shrunk_plan
from plait.recipe.load import load_recipe
from plait.workers import ForkedWorkers
from tests.parity.mutate import MUTANTS, apply, mutated_copy

RECIPE = """
[data]
files = "nothing.txt"

[model]
layers = 4
width = 64
heads = 4
kv_heads = 2
bias = "qkv"

[train]
sequence = 32
"""

SHOWN_BY: dict[str, tuple[str, ...]] = {
    "mean-of-each-rank": ("layout.replicate=3",),
    "pipeline-not-divided": ("layout.pipeline=2",),
    "copied-not-summed": ("layout.tensor=2",),
    "mean-of-each-micro-batch": ("layout.replicate=2",),
    "context-positions": ("layout.context=2",),
    "norm-counts-copies": ("layout.tensor=2",),
    "last-micro-batch-dropped": ("layout.shard=2",),
    "everybody-counts-alike": ("layout.replicate=2", "layout.shares=[3,1]"),
    "chunks-begin-alike": ("layout.pipeline=2", "layout.virtual_stages=2"),
    "bias-from-own-counts": ("layout.replicate=2", "model.experts=6"),
    "step-counts-of-one-rank": ("layout.replicate=2", "model.experts=6", "model.expert_balance=global"),
    "balance-over-a-micro-batch": ("layout.replicate=2", "model.experts=6", "model.expert_balance=sequence"),
    "every-tensor-rank-counts": ("layout.tensor=2", "model.experts=6", 'model.expert_balance=["bias","sequence"]'),
    "counted-in-forward": (
        "layout.replicate=2",
        "layout.recompute=full",
        "model.experts=6",
        "model.expert_balance=sequence",
    ),
    "expert-gradients-doubled": ("layout.replicate=2", "layout.expert=2", "model.experts=6"),
    "objective-counts-of-one-rank": ("layout.replicate=2", "model.predict_ahead=1"),
    "tables-summed-at-one-end": ("layout.pipeline=2", "model.auxiliary_heads=[1]"),
    "ahead-within-a-part": ("layout.context=2", "model.predict_ahead=1"),
    "part-of-a-row-balanced": ("layout.context=2", "model.experts=6", "model.expert_balance=sequence"),
    "capacity-of-a-part-of-a-row": ("layout.context=2", "model.experts=6", "model.expert_capacity=1.25"),
    "gates-learn-from-own-experts-alone": ("layout.replicate=2", "layout.expert=2", "model.experts=6"),
    "expert-parts-not-summed": ("layout.tensor=2", "model.experts=6"),
    "latents-of-own-heads-alone": (
        "layout.tensor=2",
        "model.key_value_rank=16",
        "model.kv_heads=4",
        "model.bias=none",
    ),
    "balance-times-accumulation": ("layout.replicate=2", "model.experts=6", "model.expert_balance=sequence"),
    "global-balance-divided-by-ranks": ("layout.replicate=2", "model.experts=6", "model.expert_balance=global"),
    "balance-of-the-first-chunk-alone": (
        "layout.pipeline=2",
        "layout.virtual_stages=2",
        "model.experts=6",
        "model.expert_balance=sequence",
    ),
}
"""Each mutant, and a layout in which its bug matters."""
SHIPPED: dict[str, str] = {
    "gates-learn-from-own-experts-alone": "transformers #48687",
    "expert-gradients-doubled": "pytorch #160285",
    "expert-parts-not-summed": "Automodel #1260",
    "balance-times-accumulation": "Automodel #3359",
    "global-balance-divided-by-ranks": "Megatron-LM #3769",
    "balance-of-the-first-chunk-alone": "torchtitan #2061",
}
"""Mutants of experts that libraries shipped, each with where it was reported."""
ADAPTER_SHOWN_BY: dict[str, str] = {
    "frozen-weights-summed": "Layout(replicate=2)",
    "tensor-trains-frozen-weights": "Layout(tensor=2)",
    "one-rank-without-adapter": "Layout(tensor=2)",
}
"""The same for mutants that only a model with an adapter shows."""
PROVE_ADAPTER = """
import sys
from dataclasses import replace
from pathlib import Path
from plait.workers import ENTRIES, ForkedWorkers
from plait.commands.verifying.gradient_check import check_gradients
from plait.commands.verifying.small_model import requested_layout, shrunk_plan
from plait.launch.local.run import ForkServer
from plait.layout import Layout
from plait.model.adapter_shape import AdapterShape
from plait.model.shape import linear_layers
from plait.recipe.load import load_recipe

config = load_recipe(Path("small.toml"))
shape, _ = requested_layout(config)
shape = replace(shape, adapter=AdapterShape(rank=4, alpha=8.0, targets=linear_layers(shape)))
with ForkServer(ENTRIES) as server:
    verdict = check_gradients(config, shrunk_plan(config, shape, LAYOUT), ForkedWorkers(server))
open("told.json", "w").write(verdict.to_json())
sys.exit(0 if verdict.ok else 1)
"""


def test_every_mutant_has_its_layout() -> None:
    assert {path.stem for path in MUTANTS.glob("*.patch")} == set(SHOWN_BY) | set(ADAPTER_SHOWN_BY)
    assert len(SHIPPED) == 6 and set(SHIPPED) < set(SHOWN_BY)


@pytest.mark.parametrize("patch", sorted(MUTANTS.parent.glob("*mutants/*.patch")), ids=lambda patch: patch.stem)
def test_every_patch_applies(patch: Path, tmp_path: Path) -> None:
    """Most mutants are only run in the long suite; that their lines are still there is known at once."""
    mutated_copy(patch, tmp_path)


USUAL = ("mean-of-each-rank", "pipeline-not-divided", "norm-counts-copies", "everybody-counts-alike")
"""A mutant of each kind: what a step is divided by, a pipeline, the norm, shares; the others take their time."""


@pytest.mark.parametrize(
    "name", [*USUAL, *(pytest.param(one, marks=pytest.mark.slow) for one in SHOWN_BY if one not in USUAL)]
)
def test_a_mutant_is_caught(name: str, tmp_path: Path) -> None:
    code, told = verify_from(mutated_copy(MUTANTS / f"{name}.patch", tmp_path), SHOWN_BY[name])
    assert code == 1 and told is not None, "it did not come to a verdict"
    assert not told["ok"]
    off = [one["error"] for one in told["worst"] if one["error"] is not None]
    assert max(off) > 1e-4, "a bug is no matter of rounding"


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one == "frozen-weights-summed" else pytest.mark.slow) for one in ADAPTER_SHOWN_BY],
)
def test_a_mutant_of_adapters_is_caught(name: str, tmp_path: Path) -> None:
    code, told = adapter_proven_from(mutated_copy(MUTANTS / f"{name}.patch", tmp_path), ADAPTER_SHOWN_BY[name])
    assert code == 1 and told is not None and not told["ok"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(set(ADAPTER_SHOWN_BY.values())))
def test_without_a_patch_adapters_are_proven(layout: str, tmp_path: Path) -> None:
    code, told = adapter_proven_from(mutated_copy(None, tmp_path), layout)
    assert code == 0 and told is not None and told["ok"]


def test_the_same_copy_without_a_patch_is_green(tmp_path: Path) -> None:
    code, told = verify_from(mutated_copy(None, tmp_path), SHOWN_BY["copied-not-summed"])
    assert code == 0 and told is not None and told["ok"]
    assert set(told) == {"ok", "layout", "world_size", "max_grad_rel_err", "max_param_rel_err", "worst"}
    assert told["world_size"] == 2 and 0 < told["max_grad_rel_err"] < 1e-12 and told["max_param_rel_err"] < 1e-9


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(one, id=" ".join(one), marks=pytest.mark.slow if "model.experts=6" in one else ())
        for one in sorted(set(SHOWN_BY.values()))
    ],
)
def test_without_the_bugs_all_these_layouts_are_green(
    asked: tuple[str, ...], tmp_path: Path, workers: ForkedWorkers
) -> None:
    (tmp_path / "small.toml").write_text(RECIPE)
    config = load_recipe(tmp_path / "small.toml", asked)
    assert check_gradients(config, shrunk_plan(config, *requested_layout(config), requested_shares(config)), workers).ok


def test_a_patch_that_no_longer_applies_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\n")
    with pytest.raises(AssertionError, match="no longer applies"):
        apply("--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-three\n+four\n", tmp_path)
    apply("--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-two\n+four\n", tmp_path)
    assert (tmp_path / "a.py").read_text() == "one\nfour\n"


def verify_from(folder: Path, asked: tuple[str, ...]) -> tuple[int, dict[str, Any] | None]:
    """Exit code and JSON of `plait verify` as the copy in a folder does it."""
    return ended_in(folder, ["-m", "plait", "verify", "small.toml", *asked, "--json", "told.json"])


def adapter_proven_from(folder: Path, layout: str) -> tuple[int, dict[str, Any] | None]:
    """The same of a model with an adapter."""
    (folder / "prove.py").write_text(PROVE_ADAPTER.replace("LAYOUT)", f"{layout})"))
    return ended_in(folder, ["prove.py"])


def ended_in(folder: Path, arguments: list[str]) -> tuple[int, dict[str, Any] | None]:
    (folder / "small.toml").write_text(RECIPE)
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    told = folder / "told.json"
    if not told.exists():
        print(ended.stdout, ended.stderr)
        return ended.returncode, None
    return ended.returncode, json.loads(told.read_text())
