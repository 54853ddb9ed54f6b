"""Formulas for processors beside steps that one took: nothing of these steps went into the formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.planner.derive.resources import Resources
from plait.planner.resolve.resolve import draft
from tests.planner.machines import LAPTOP, corpus, recipe

TWO_CORES = replace(LAPTOP, name="AMD EPYC", cores=2, memory_bytes=24 * 2**30)
PRODUCTS_FLOPS = 2.09e11
"""As plait measured it there (2026-11-23)."""
TIMED_S = {
    ("1M", 128): (0.259, 0.265),
    ("1M", 512): (0.331, 0.331),
    ("3M", 128): (0.608, 0.588),
    ("3M", 512): (0.761, 0.738),
    ("11M", 128): (1.78, 1.71),
    ("11M", 512): (2.19, 2.13),
}
"""Seconds of a step, one worker with both cores and two with one each, on that machine: `plait plan
recipes/01-shakespeare.toml model.size=… train.sequence=… train.batch_tokens=4096 train.budget="50 steps" --prove 2`."""


@pytest.mark.parametrize(("size", "sequence"), TIMED_S)
def test_formulas_foretell_steps_of_a_processor_whose_products_were_timed(
    tmp_path: Path, size: str, sequence: int
) -> None:
    run = (f"model.size={size}", f"train.sequence={sequence}", "train.batch_tokens=4096", "train.budget=50 steps")
    config = recipe(tmp_path, *run, "optimizer.kind=adamw")
    resources = Resources(machine=TWO_CORES, peak_flops=PRODUCTS_FLOPS)
    splits = draft(config, corpus(340_000, 100), resources, recipe_hash="cafe").layouts
    assert [split.workers for split in splits] == [1, 2]
    for split, timed_s in zip(splits, TIMED_S[size, sequence], strict=True):
        assert split.forecast is not None
        assert split.forecast.step_s == pytest.approx(timed_s, rel=0.12)
