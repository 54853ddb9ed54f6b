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
from tests.parity.conftest import CallMutant
from tests.parity.mutant_proofs import RECIPE
from tests.parity.mutate import MUTANTS, apply, mutated_copy

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
ADAPTER_SHOWN_BY = {
    "frozen-weights-summed": {"replicate": 2},
    "tensor-trains-frozen-weights": {"tensor": 2},
    "one-rank-without-adapter": {"tensor": 2},
}
"""The same for mutants that only a model with an adapter shows."""
QUANTIZED_SHOWN_BY: dict[str, dict[str, Any]] = {
    "gathered-blocks-begin-alike": {"shard": 2, "shard_what": "parameters"},
    "columns-begin-alike": {"tensor": 2},
}
"""The same for mutants that only quantized weights show."""


def test_every_mutant_has_its_layout() -> None:
    assert {path.stem for path in MUTANTS.glob("*.patch")} == {*SHOWN_BY, *ADAPTER_SHOWN_BY, *QUANTIZED_SHOWN_BY}
    assert len(SHIPPED) == 6 and set(SHIPPED) < set(SHOWN_BY)


@pytest.mark.parametrize("name", SHOWN_BY)
def test_a_mutant_is_caught(name: str, call_mutant: CallMutant) -> None:
    told = call_mutant(MUTANTS / f"{name}.patch", "verdict_of_recipe", SHOWN_BY[name])
    off = [one["error"] for one in told["worst"] if one["error"] is not None]
    assert not told["ok"] and max(off) > 1e-4, "a bug is no matter of rounding"


@pytest.mark.parametrize("name", ADAPTER_SHOWN_BY)
def test_a_mutant_of_adapters_is_caught(name: str, call_mutant: CallMutant) -> None:
    assert not call_mutant(MUTANTS / f"{name}.patch", "verdict_of_adapter", ADAPTER_SHOWN_BY[name])["ok"]


@pytest.mark.parametrize("name", QUANTIZED_SHOWN_BY)
def test_a_mutant_of_quantized_weights_is_caught(name: str, call_mutant: CallMutant) -> None:
    degrees = QUANTIZED_SHOWN_BY[name]
    assert not call_mutant(MUTANTS / f"{name}.patch", "verdict_of_adapter", degrees, "nf4")["ok"]
    assert call_mutant(None, "verdict_of_adapter", degrees, "nf4")["ok"]


@pytest.mark.parametrize("degree", ["replicate", "tensor"])
def test_without_a_patch_adapters_are_proven(degree: str, call_mutant: CallMutant) -> None:
    assert call_mutant(None, "verdict_of_adapter", {degree: 2})["ok"]


@pytest.mark.slow
@pytest.mark.parametrize(("patch", "code"), [("mean-of-each-rank", 1), (None, 0)])
def test_verify_ends_with_the_verdict(patch: str | None, code: int, tmp_path: Path) -> None:
    folder = mutated_copy(MUTANTS / f"{patch}.patch" if patch else None, tmp_path)
    ended, told = verify_from(folder, ("layout.replicate=2", "layout.shares=[3,1]"))
    assert ended == code and told is not None and told["ok"] == (code == 0)
    assert set(told) == {"ok", "layout", "world_size", "max_grad_rel_err", "max_param_rel_err", "worst"}
    assert told["world_size"] == 2
    assert (0 < told["max_grad_rel_err"] < 1e-12 and told["max_param_rel_err"] < 1e-9) == (code == 0)


@pytest.mark.parametrize("asked", sorted(set(SHOWN_BY.values())), ids=" ".join)
def test_without_the_bugs_all_these_layouts_are_green(
    asked: tuple[str, ...], tmp_path: Path, workers: ForkedWorkers
) -> None:
    (tmp_path / "small.toml").write_text(RECIPE)
    config = load_recipe(tmp_path / "small.toml", asked)
    plan = shrunk_plan(config, *requested_layout(config), requested_shares(config))
    assert check_gradients(config, plan, workers, scope="gradients").ok


def test_a_patch_that_no_longer_applies_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\n")
    with pytest.raises(AssertionError, match="no longer applies"):
        apply("--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-three\n+four\n", tmp_path)
    apply("--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-two\n+four\n", tmp_path)
    assert (tmp_path / "a.py").read_text() == "one\nfour\n"


def verify_from(folder: Path, asked: tuple[str, ...]) -> tuple[int, dict[str, Any] | None]:
    """Exit code and JSON of `plait verify` as the copy in a folder does it."""
    (folder / "small.toml").write_text(RECIPE)
    ended = subprocess.run(
        [sys.executable, "-m", "plait", "verify", "small.toml", *asked, "--json", "told.json"],
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
