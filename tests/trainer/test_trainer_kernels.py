"""Deterministic kernels are the plan's choice: GPUs are fast unless the recipe asks for the same bits each time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait.trainer.worker import select_deterministic_kernels
from tests.planner.machines import LAPTOP, ONE_H100, WEB, planned, recipe


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(mode=False)
    torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def test_gpus_compute_deterministically_only_where_it_is_asked_for(tmp_path: Path) -> None:
    size = ("model.size=1B", "train.budget=100 steps")
    usual = planned(recipe(tmp_path, *size), WEB, ONE_H100)
    asked = planned(recipe(tmp_path, *size, "train.deterministic=true"), WEB, ONE_H100)
    for plan in (asked, usual):
        select_deterministic_kernels(plan)
        assert torch.are_deterministic_algorithms_enabled() is plan.arithmetic.deterministic is (plan is asked)
    assert planned(recipe(tmp_path, *size), WEB, replace(LAPTOP, memory_bytes=2**38)).arithmetic.deterministic
