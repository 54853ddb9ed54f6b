"""The benchmarks for GPUs run on a processor with a tiny model: each contender with its flags, and each setting."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.gpu_settings import QUESTIONS
from benchmarks.one_gpu import CONTENDERS, SMOKE, answer
from benchmarks.processes import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("size", ["125M", "1B"])
@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_answers(name: str, size: str) -> None:
    if name == "Trainer":
        pytest.importorskip("accelerate", reason="comes with `make env-bench`")
    found = answer(name, size, [*SMOKE, "--attention", "any", "--peak-flops", "1e9"])
    assert found["step_s"] > 0 and 4.5 < found["first_loss"] < 6.5  # near the logarithm of 256 entries
    flops_per_token = 1e9 * found["mfu"] / found["tokens_per_s"]
    assert 3 * found["parameters"] < flops_per_token < 12 * found["parameters"]


@pytest.mark.slow
def test_every_setting_is_timed() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_settings", "--smoke", "--rounds", "1"]
    told = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=900).stdout
    assert all(f"### {name}\n" in told for name in QUESTIONS)
    assert told.count("| 1.000 |") >= len(QUESTIONS) and told.count("\n| ") == sum(
        2 + len(q.values) for q in QUESTIONS.values()
    )
